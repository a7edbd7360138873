"""In which order a training run sees its tokens: any step's batch in O(1), by arithmetic alone.

Nothing is shuffled or kept, so a run resumes at any step with nothing but the step's number. What
looks random is mixed from a key, the same on every machine and in every version.
"""

import hashlib
from collections.abc import Iterator, Mapping

import numpy as np
import torch

from wakeful.errors import WakefulError

IGNORED = -100  # the target that torch.nn.functional.cross_entropy leaves out
NUM_ROUNDS = 8  # of the Feistel network; four suffice for large halves, short ones mix slowly


def documents_of(tokens: torch.Tensor, end_of_text: int) -> torch.Tensor:
    """Return the number of each token's document in its row, both (rows, length).

    end_of_text begins a document: its first token is predicted from there, as a prompt's is, and
    the end of the one before from that one's last token.
    """
    return (tokens == end_of_text).cumsum(1)


def evenly(count: int, size: int) -> np.ndarray:
    """Return at most `count` different numbers below `size`, evenly apart, 0 the first."""
    count = min(count, size)
    return np.arange(count) * size // max(count, 1)


class Tokens:
    """Tokens for training and validation: one long row of ids, or a source that serves as one."""

    num_tokens: int
    vocab_size: int
    end_of_text: int

    @property
    def stretches(self) -> Mapping[str, int]:
        """The tokens of each domain in turn, by its name, which is empty where there is but one."""
        return {"": self.num_tokens}

    def read(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Return the `count` tokens from each start on: int64 (len(starts), count)."""
        raise NotImplementedError

    def spread(self, rows: int, length: int, within: int = 0) -> np.ndarray:
        """Return where rows of `length` tokens start, evenly spread over the first `within` tokens.

        Over all of them where that is 0. At most `rows` of them; none reaches past the end.
        """
        return length * evenly(rows, (within or self.num_tokens) // length)

    def optimal(self, rows: np.ndarray) -> np.ndarray | None:
        """Return −ln p of each token of `rows` (n, L + 1) but the first, (n, L), in nats.

        p is the probability with which the token was drawn after those before it, so that no model
        loses less in expectation. None for text, of which nobody knows it.
        """
        return None

    def is_trigger(self, rows: np.ndarray) -> np.ndarray | None:
        """Return where a head is needed, because the next token depends on more than the last.

        Bool, as `rows`; None for text, of which nobody knows it.
        """
        return None


class Permutation:
    """A pseudorandom permutation of range(size), computed element by element.

    A balanced Feistel network (Luby and Rackoff, SIAM J. Comput. 17(2), 1988) permutes the next
    power of four, at most 4 `size`; what falls outside the range is sent through again until it is
    inside (cycle walking: Black and Rogaway, CT-RSA 2002), which keeps it a bijection.
    """

    def __init__(self, size: int, seed: int) -> None:
        if not 1 <= size <= 2**62:
            raise ValueError(f"size is {size}: it must be between 1 and 2**62")
        self.size = size
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._shift = np.uint64(half_bits)
        self._mask = np.uint64(2**half_bits - 1)
        self._keys = [key64("round", seed, number) for number in range(NUM_ROUNDS)]

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return where `places` (integers in range(size), any shape) go: int64, the same shape."""
        shape = np.shape(places)
        flat = np.ravel(places).astype(np.int64)
        if flat.size and not (flat.min() >= 0 and flat.max() < self.size):
            raise IndexError(f"a place is outside range({self.size})")
        values = self._network(flat.astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            values[outside] = self._network(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64).reshape(shape)

    def _network(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._shift, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (mix64(right, key) & self._mask)
        return (left << self._shift) | right


class WindowOrder:
    """Order of windows: each window once per epoch, in another order each time (`Batches`)."""

    def __init__(self, num_tokens: int, length: int, seed: int) -> None:
        self.num_tokens, self.length, self.seed = num_tokens, length, seed
        self.num_windows = num_tokens // length

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """Return where the windows begin that come as the `numbers`-th, counted from 0."""
        epochs, places = np.divmod(numbers, self.num_windows)
        starts = np.empty_like(places)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            order = Permutation(self.num_windows, key64("epoch", self.seed, epoch))
            offset = key64("offset", self.seed, epoch) % self.num_tokens
            starts[here] = order(places[here]) * self.length + offset
        return starts % self.num_tokens


class Batches:
    """The training batches: windows of `length` + 1 tokens, each window once an epoch.

    An epoch cuts the tokens, as a circle closed from the end to the beginning, into
    `num_windows` = num_tokens // `length` windows from a random place on, and goes through them
    in a random order; both differ by epoch. Windows overlap in one token, which is the last target
    of one and the first input of the next, so that no token is a target twice in an epoch. With
    `bos` each window begins with that token instead of its first, and has the same targets.
    `batch_size` counts the sequences of all ranks together, and each rank gets its share, so
    (seed, step) gives the same global batch for every `world_size`.
    """

    def __init__(
        self,
        token_file: Tokens,
        *,
        length: int,
        batch_size: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        bos: int | None = None,
        first: int = 0,
    ) -> None:
        """Make the order; it reads no token yet. The run's first batch is the `first`-th of it.

        Raises:
            WakefulError: the tokens are fewer than one sequence needs, or the processes cannot
                share a batch.
        """
        _check_positive(length=length, batch_size=batch_size, world_size=world_size)
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}: it must be in range({world_size})")
        if batch_size % world_size:
            raise WakefulError(
                f"batch_size is {batch_size}: it must be a multiple of the {world_size} processes"
            )
        for domain, size in token_file.stretches.items():
            if size < length + 1:
                raise WakefulError(
                    f"the training data{_of(domain)} has {size} tokens, and one sequence of "
                    f"{length} needs {length + 1}: pass more text or a shorter length"
                )
        self.token_file = token_file
        self.length = length
        self.batch_size = batch_size
        self.seed = seed
        self.bos = bos
        self.first = first
        self._order = WindowOrder(token_file.num_tokens, length, seed)
        self.num_windows = self._order.num_windows
        share = batch_size // world_size
        self._rows = np.arange(rank * share, (rank + 1) * share)

    def batch(self, step: int) -> torch.Tensor:
        """Return this rank's part of a batch: int64 (batch_size / world_size, length + 1)."""
        rows = self.token_file.read(self.starts(step), self.length + 1)
        if self.bos is not None:
            rows[:, 0] = self.bos
        return torch.from_numpy(rows)

    def starts(self, step: int) -> np.ndarray:
        """Return the position in the file where each row of `batch(step)` begins."""
        if step < 0:
            raise ValueError(f"step is {step}: it must not be negative")
        return self.starts_of((self.first + step) * self.batch_size + self._rows)

    def starts_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return where the windows begin that are read as the `numbers`-th of the run."""
        return self._order(numbers)


class ValidationWindows:
    """The whole validation set in its order, the same for every model and every run.

    Window i has the inputs [i length, (i + 1) length) and the targets one further, so each token
    but the file's first is predicted exactly once. The last window may be shorter: its inputs are
    filled up with end_of_text and its targets with -100. With `bos` each window's first input is
    that token instead, and the targets are the same. Of a mixture it is every domain's windows, one
    domain after another.
    """

    def __init__(
        self, token_file: Tokens, *, length: int, batch_size: int, bos: int | None = None
    ) -> None:
        """Lay out the windows, reading no token yet; refuse a set without a token to predict."""
        _check_positive(length=length, batch_size=batch_size)
        for domain, size in token_file.stretches.items():
            if size < 2:
                raise WakefulError(
                    f"the validation data{_of(domain)} has {size} tokens and needs 2: "
                    "pass more validation text, or a larger data.validation_fraction"
                )
        self.token_file = token_file
        self.length = length
        self.batch_size = batch_size
        self.bos = bos
        self._sizes = np.array([*token_file.stretches.values()], np.int64)
        self._windows = 1 + (self._sizes - 2) // length
        self.num_predicted = int((self._sizes - 1).sum())
        """Targets in all the batches together."""
        self.num_windows = int(self._windows.sum())

    def _places(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return where windows begin, and how many targets their domain has from there on."""
        ends = np.cumsum(self._windows)
        owners = np.searchsorted(ends, windows, side="right")
        starts = (windows - (ends - self._windows)[owners]) * self.length
        offsets = np.cumsum(self._sizes) - self._sizes
        return starts + offsets[owners], self._sizes[owners] - 1 - starts

    def domains(self) -> list[str] | None:
        """Return the domain of each window; None where the text is not of several."""
        names = [*self.token_file.stretches]
        return np.repeat(names, self._windows).tolist() if len(names) > 1 else None

    def __len__(self) -> int:
        """Return how many batches there are; the last may have fewer rows."""
        return 1 + (self.num_windows - 1) // self.batch_size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return map(self.batch, range(len(self)))

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs and targets, int64 (rows, length) each, rows at most batch_size."""
        if not 0 <= number < len(self):
            raise IndexError(f"batch {number} of {len(self)}")
        first = number * self.batch_size
        windows = np.arange(first, min(first + self.batch_size, self.num_windows))
        starts, ends = self._places(windows)
        rows = self.token_file.read(starts, self.length + 1)
        inside = np.arange(self.length) < ends[:, None]  # the last window may go past the end
        inputs = np.where(inside, rows[:, :-1], self.token_file.end_of_text)
        targets = np.where(inside, rows[:, 1:], IGNORED)
        if self.bos is not None:
            inputs[:, 0] = self.bos
        return torch.from_numpy(inputs), torch.from_numpy(targets)


def _of(domain: str) -> str:
    return f" of {domain}" if domain else ""


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} is {number}: it must be at least 1")


def key64(purpose: str, *numbers: int) -> int:
    """Return a 64-bit key for a purpose and numbers (a seed, an epoch), far from any other's."""
    text = ":".join([purpose, *(str(int(number)) for number in numbers)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def mix64(values: np.ndarray, key: int) -> np.ndarray:
    """Return SplitMix64's finalizer of (`values` + `key`): a bijection of uint64, elementwise.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014).
    `values` must be an array of uint64: NumPy warns of overflow for scalars, and wraps for arrays.
    """
    mixed = values + np.uint64(key)
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
