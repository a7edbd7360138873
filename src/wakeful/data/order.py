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


def number_documents(tokens: torch.Tensor, end_of_text: int) -> torch.Tensor:
    """Return, for each token of `tokens` (rows, length), the number of its document within the row,
    counted from 0.

    An end_of_text token belongs to the document after it, whose first token is predicted from it.
    """
    return (tokens == end_of_text).cumsum(1)


def evenly(count: int, size: int) -> np.ndarray:
    """Return `count` evenly spaced integers below `size` (at most `size` of them), from 0 on."""
    count = min(count, size)
    return np.arange(count) * size // max(count, 1)


class Tokens:
    """Tokens for training and validation: one long row of ids, or a source that serves as one."""

    num_tokens: int
    vocab_size: int
    end_of_text: int

    @property
    def domain_sizes(self) -> Mapping[str, int]:
        """Number of tokens of each domain, by its name, in order; "" names a single domain."""
        return {"": self.num_tokens}

    def read(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Return the `count` tokens from each start on: int64 (len(starts), count)."""
        raise NotImplementedError

    def spread_starts(self, rows: int, length: int, within: int = 0) -> np.ndarray:
        """Return the starts of at most `rows` rows of `length` tokens, evenly spread over the first
        `within` tokens (0: all); no row reaches past the end.
        """
        return length * evenly(rows, (within or self.num_tokens) // length)

    def optimal_losses(self, rows: np.ndarray) -> np.ndarray | None:
        """Return the lowest possible expected loss −ln p of each token of `rows` (n, L + 1) except
        the first: (n, L), in nats.

        p is the probability with which a task draws the token after those before it. None for text,
        whose probabilities are unknown.
        """
        return None

    def is_trigger(self, rows: np.ndarray) -> np.ndarray | None:
        """Return a mask of the triggers among the tokens `rows`, of the same shape; None for text.

        A trigger is a token of a task whose successor depends on earlier tokens too, so that
        predicting it needs attention.
        """
        return None


class Permutation:
    """A pseudorandom permutation of range(size), computed element by element.

    A balanced Feistel network (Luby and Rackoff, SIAM J. Comput. 17(2), 1988) permutes the next
    power of four, at most 4 `size`; what falls outside the range is sent through again until it is
    inside (cycle walking: Black and Rogaway, CT-RSA 2002), which keeps it a bijection.
    """

    def __init__(self, size: int, seed: int) -> None:
        """Define the permutation of range(`size`) that belongs to `seed`; `size` is 1 to 2⁶²."""
        self.size = size
        # The network permutes the numbers of 2 · half_bits bits: at least `size` of them.
        half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
        self._shift = np.uint64(half_bits)
        self._mask = np.uint64(2**half_bits - 1)
        self._keys = [derive_key("round", seed, number) for number in range(NUM_ROUNDS)]

    def __call__(self, places: np.ndarray) -> np.ndarray:
        """Return the images of `places` (integers in range(size), any shape) under the permutation:
        int64, the same shape.
        """
        shape = np.shape(places)
        flat = np.ravel(places).astype(np.int64)
        values = self._apply_network(flat.astype(np.uint64))
        outside = np.flatnonzero(values >= self.size)
        while outside.size:  # cycle walking: again, until every value is in the range
            values[outside] = self._apply_network(values[outside])
            outside = outside[values[outside] >= self.size]
        return values.astype(np.int64).reshape(shape)

    def _apply_network(self, values: np.ndarray) -> np.ndarray:
        """Apply the Feistel network to uint64 values of two halves of `_shift` bits each."""
        high, low = values >> self._shift, values & self._mask
        for key in self._keys:
            high, low = low, high ^ (mix64(low, key) & self._mask)
        return (high << self._shift) | low


class WindowOrder:
    """Order of training windows: each window once per epoch, in a new random order every epoch."""

    def __init__(self, num_tokens: int, length: int, seed: int) -> None:
        """Define the order of the windows of `length` tokens in a row of `num_tokens`."""
        self.num_tokens, self.length, self.seed = num_tokens, length, seed
        self.num_windows = num_tokens // length

    def __call__(self, numbers: np.ndarray) -> np.ndarray:
        """Return the position of the first token of each window whose number, counted from 0 over
        all epochs, is in `numbers`.
        """
        epochs, positions = np.divmod(numbers, self.num_windows)
        starts = np.empty_like(positions)
        for epoch in np.unique(epochs):
            in_epoch = epochs == epoch
            permutation = Permutation(self.num_windows, derive_key("epoch", self.seed, epoch))
            offset = derive_key("offset", self.seed, epoch) % self.num_tokens
            starts[in_epoch] = permutation(positions[in_epoch]) * self.length + offset
        return starts % self.num_tokens  # the tokens are a circle, cut at `offset`


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
        """Define the order of windows, without reading a token.

        `batch_size` counts the rows of all `world_size` processes together; this is process number
        `rank`. `bos` replaces the first token of every window (None: nothing does). `first` is the
        number of the batch that step 0 gets.

        Raises:
            WakefulError: the tokens are fewer than one sequence needs, or the processes cannot
                share a batch.
        """
        if batch_size % world_size:
            raise WakefulError(
                f"batch_size is {batch_size}: it must be a multiple of the {world_size} processes"
            )
        for domain, size in token_file.domain_sizes.items():
            if size < length + 1:
                raise WakefulError(
                    f"the training data{_format_domain(domain)} has {size} tokens, and one "
                    f"sequence of {length} needs {length + 1}: pass more text or a shorter length"
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
        self._rows = np.arange(rank * share, (rank + 1) * share)  # of each batch, for this process

    def batch(self, step: int) -> torch.Tensor:
        """Return this rank's part of a batch: int64 (batch_size / world_size, length + 1)."""
        rows = self.token_file.read(self.starts(step), self.length + 1)
        if self.bos is not None:
            rows[:, 0] = self.bos
        return torch.from_numpy(rows)

    def starts(self, step: int) -> np.ndarray:
        """Return the position in the file where each row of `batch(step)` begins."""
        return self.window_starts_of((self.first + step) * self.batch_size + self._rows)

    def window_starts_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the positions in the tokens where the `numbers`-th windows of the run begin."""
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
        """Compute the windows, without reading a token; raise `WakefulError` for a validation set
        (or domain) without a token to predict.
        """
        for domain, size in token_file.domain_sizes.items():
            if size < 2:
                raise WakefulError(
                    f"the validation data{_format_domain(domain)} has {size} tokens and needs 2: "
                    "pass more validation text, or a larger data.validation_fraction"
                )
        self.token_file = token_file
        self.length = length
        self.batch_size = batch_size
        self.bos = bos
        self._domain_sizes = np.array([*token_file.domain_sizes.values()], np.int64)
        # All tokens of a domain but its first are targets, `length` of them in a window.
        self._windows_per_domain = 1 + (self._domain_sizes - 2) // length
        self.num_predicted = int((self._domain_sizes - 1).sum())
        """Targets in all the batches together."""
        self.num_windows = int(self._windows_per_domain.sum())

    def _locate_windows(self, windows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return for each window, given by its number from 0, the position where it begins, and the
        number of targets from there to the end of its domain.
        """
        window_ends = np.cumsum(self._windows_per_domain)
        domain_ids = np.searchsorted(window_ends, windows, side="right")
        first_windows = window_ends - self._windows_per_domain  # of each domain
        starts_in_domain = (windows - first_windows[domain_ids]) * self.length
        num_targets = self._domain_sizes[domain_ids] - 1 - starts_in_domain
        domain_offsets = np.cumsum(self._domain_sizes) - self._domain_sizes
        return starts_in_domain + domain_offsets[domain_ids], num_targets

    def domains(self) -> list[str] | None:
        """Return the name of each window's domain; None where the data has a single domain."""
        names = [*self.token_file.domain_sizes]
        return np.repeat(names, self._windows_per_domain).tolist() if len(names) > 1 else None

    def __len__(self) -> int:
        """Return how many batches there are; the last may have fewer rows."""
        return 1 + (self.num_windows - 1) // self.batch_size

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        return map(self.batch, range(len(self)))

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and the targets of one batch, int64 (rows, length) each; the last batch
        may have fewer rows than batch_size.
        """
        first = number * self.batch_size
        windows = np.arange(first, min(first + self.batch_size, self.num_windows))
        starts, num_targets = self._locate_windows(windows)
        rows = self.token_file.read(starts, self.length + 1)
        # False past the end of a domain, whose last window may be shorter.
        has_target = np.arange(self.length) < num_targets[:, None]
        inputs = np.where(has_target, rows[:, :-1], self.token_file.end_of_text)
        targets = np.where(has_target, rows[:, 1:], IGNORED)
        if self.bos is not None:
            inputs[:, 0] = self.bos
        return torch.from_numpy(inputs), torch.from_numpy(targets)


def _format_domain(domain: str) -> str:
    return f" of {domain}" if domain else ""


def derive_key(purpose: str, *numbers: int) -> int:
    """Derive a 64-bit key from a purpose and numbers, such as a seed and an epoch, by SHA-256."""
    text = ":".join([purpose, *(str(int(number)) for number in numbers)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def mix64(values: np.ndarray, key: int) -> np.ndarray:
    """Mix the bits of `values` + `key` by SplitMix64's finalizer, a bijection of uint64.

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
