"""Perplexity of a text, in windows.

Let x be the text's tokens (with BOS: BOS and the text's tokens), and T the number of tokens to
predict, all of x but its first. Window k has the inputs x[kS .. kS + L − 1] and the targets one
place later, and counts those that no window before it did: with a stride S = L each token is
predicted once from what its window holds of the text before it, with S < L from at least L − S + 1
tokens where the text has them. With BOS, every window's first input is BOS. So every token but the
first is counted once, whatever L and S are.

    perplexity = exp(Σ nats / Σ tokens)        bits per byte = Σ nats / (ln 2 · Σ bytes)

The second counts the UTF-8 bytes of the text that the tokens stand for, so it can be compared
across tokenizers. A window is one cluster of the standard error.

Shapes: B batch, L tokens.
"""

import hashlib
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from wakeful.data.tasks import TaskData
from wakeful.data.tasks.base import VALIDATION_TOKENS
from wakeful.errors import WakefulError
from wakeful.evaluation.reading import task_rows
from wakeful.evaluation.scores import Score
from wakeful.loading.model import Model
from wakeful.model.decoder import IGNORED
from wakeful.model.finite import check_logits
from wakeful.probes import running
from wakeful.probes.running import first_target, states_of
from wakeful.quant.linear import QuantizedLinear
from wakeful.world import ALONE, World


@dataclass(frozen=True)
class Window:
    """Some inputs, and which of the tokens after them are counted here."""

    inputs: list[int]
    targets: list[int]
    """As many; −100 where another window counts the token."""
    first: int
    """The place in x of the first counted target."""


@dataclass(frozen=True)
class TokenizedText:
    """A text's tokens and where each ends."""

    tokens: list[int]
    ends: np.ndarray | None
    """(tokens,) UTF-8 bytes of the text up to each token's end; None where they are not known."""
    num_bytes: int


def perplexity(
    loaded: Model,
    text: str | TaskData,
    *,
    length: int,
    stride: int,
    num_sequences: int = 0,
    bos: bool = False,
    batch_size: int = 4,
    progress: Callable[[int, int], None] = lambda done, total: None,
    world: World = ALONE,
) -> list[Score]:
    """Return the perplexity and the bits per byte of a text, by windows of `length` tokens.

    Of several processes each takes its share of the batches, and returns the scores of all.

    `stride` is at most `length`; `num_sequences` windows at most are taken from the text's
    beginning, 0 for all. Bits per byte are left out where the tokenizer does not say which part of
    the text a token stands for. A task's text is its validation windows, each of which stands
    alone; their loss over the task's own takes the place of bits per byte.

    Raises:
        WakefulError: a text of fewer than 2 tokens, a window past the model's context, no BOS
            where one is asked for, or a model whose likelihoods mean nothing.
    """
    check_windows(loaded, length=length, stride=stride, bos=bos)
    tokenized = None
    if isinstance(text, TaskData):
        cut = _task_windows(
            loaded, text, length=length, stride=stride, num_sequences=num_sequences, bos=bos
        )
    else:
        tokenized = tokenize(loaded, text)
        cut = _text_windows(loaded, tokenized, length=length, stride=stride, bos=bos)
        cut = cut[:num_sequences] if num_sequences else cut
    keys = tuple(_key(window) for window in cut)
    world.check_same(
        [loaded.name, *keys],
        f"the processes read different text for {loaded.name}: give each machine the same text and "
        "the same model",
    )
    nats = np.zeros(len(cut))
    progress(0, len(cut))
    for start in range(0, len(cut), batch_size)[world.rank :: world.size]:
        batch = cut[start : start + batch_size]
        nats[start : start + len(batch)] = _nats(loaded, batch)
        progress(start + len(batch), len(cut))
    world.meet()
    nats = world.sum(torch.from_numpy(nats)).numpy()
    counts = np.array([sum(target != IGNORED for target in each.targets) for each in cut], float)
    scores = [
        Score(
            model=loaded.name, task="text", metric="perplexity", keys=keys, values=nats,
            weights=counts, exponential=True, higher_is_better=False,
        )
    ]  # fmt: skip
    if isinstance(text, TaskData):
        rows = np.array([[*window.inputs, window.targets[-1]] for window in cut])
        scores.append(
            Score(
                model=loaded.name, task="text", metric="loss over the task's own", keys=keys,
                values=nats - text.task.losses(rows).sum(1), weights=counts,
                higher_is_better=False,
            )
        )  # fmt: skip
    sizes = tokenized and _sizes(tokenized, cut, counts, bos=bos)
    if sizes is not None:
        scores.append(
            Score(
                model=loaded.name, task="text", metric="bits per byte", keys=keys,
                values=nats / math.log(2), weights=sizes, higher_is_better=False,
            )
        )  # fmt: skip
    return scores


def _text_windows(
    loaded: Model, text: TokenizedText, *, length: int, stride: int, bos: bool
) -> list[Window]:
    if len(text.tokens) < 2:
        raise WakefulError(
            f"the text has {len(text.tokens)} of {loaded.name}'s tokens; at least 2 are needed"
        )
    stream = [loaded.bos, *text.tokens] if bos and loaded.bos is not None else text.tokens
    return windows(stream, length=length, stride=stride, bos=bos)


def _task_windows(
    loaded: Model, data: TaskData, *, length: int, stride: int, num_sequences: int, bos: bool
) -> list[Window]:
    if stride != length:
        raise WakefulError(
            f"stride = {stride}: the windows of {data.task} stand alone; leave it out"
        )
    most = VALIDATION_TOKENS // length
    number = min(num_sequences or most, most)
    rows = task_rows(
        loaded, data, length=length, num_sequences=number, bos=bos, targets=1
    ).tolist()  # fmt: skip
    return [Window(row[:-1], row[1:], 1) for row in rows]


def check_windows(loaded: Model, *, length: int, stride: int, bos: bool) -> None:
    """Raise `WakefulError` where a model cannot be run on such windows."""
    check_causal(loaded.name, loaded.module)
    check_sizes(length=length, stride=stride)
    if length > loaded.context:
        raise WakefulError(
            f"length = {length} is past {loaded.name}'s context of {loaded.context} tokens; "
            "choose a lower one"
        )
    if bos and loaded.bos is None:
        raise WakefulError(f"{loaded.name} has no BOS token; leave out --bos")


def check_sizes(*, length: int, stride: int) -> None:
    """Raise `WakefulError` for windows of no use to any model."""
    if length < 2:
        raise WakefulError(f"length = {length}: a window needs at least 2 tokens")
    if not 1 <= stride <= length:
        raise WakefulError(f"stride = {stride} must be between 1 and the length, {length}")


def windows(stream: list[int], *, length: int, stride: int, bos: bool) -> list[Window]:
    """Cut x into windows; with `bos`, x[0] is BOS and stands first in every window."""
    cut: list[Window] = []
    counted = 1
    start = 0
    while counted < len(stream):
        inputs = stream[start : start + length]
        targets = stream[start + 1 : start + length + 1]
        inputs = inputs[: len(targets)]
        if bos:
            inputs[0] = stream[0]
        seen = counted - start - 1
        targets = [IGNORED] * seen + targets[seen:]
        cut.append(Window(inputs, targets, counted))
        counted = start + len(targets) + 1
        start += stride
    return cut


def tokenize(loaded: Model, text: str) -> TokenizedText:
    """Encode a text whole, with the bytes up to each token's end where the tokenizer tells."""
    tokens, ends = loaded.plain_with_ends(text)
    if ends is None:
        return TokenizedText(tokens, None, len(text.encode("utf-8")))
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    sizes = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    bytes_before = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    # An end may lie before its left neighbor's where one character is several tokens.
    ends_in_bytes = np.maximum.accumulate(bytes_before[np.asarray(ends, dtype=np.int64)])
    return TokenizedText(tokens, ends_in_bytes, int(bytes_before[-1]))


def _sizes(
    tokenized: TokenizedText, cut: list[Window], counts: np.ndarray, *, bos: bool
) -> np.ndarray | None:
    """Return the bytes that each window's counted tokens stand for."""
    if tokenized.ends is None:
        return None
    # Ends of 0 and more tokens; the last token has what is left of the text.
    ends = np.concatenate([[0], tokenized.ends[:-1], [tokenized.num_bytes]])
    first = np.array([window.first for window in cut]) - bos
    sizes = ends[first + counts.astype(np.int64)] - ends[first]
    return sizes.astype(np.float64) if sizes.sum() > 0 else None


@torch.inference_mode()
def _nats(loaded: Model, batch: list[Window]) -> np.ndarray:
    # Windows of one length run together: padding would enter a quantized layer's scale.
    found: list[np.ndarray] = []
    for _, alike in itertools.groupby(batch, lambda window: len(window.inputs)):
        rows = [(window.inputs, window.targets) for window in alike]
        inputs, targets = (torch.tensor(part) for part in zip(*rows, strict=True))
        likelihoods, _ = log_likelihoods(
            loaded.module, inputs.to(loaded.device), targets.to(loaded.device)
        )
        found.append(-likelihoods.sum(1).numpy())
    return np.concatenate(found)


def _key(window: Window) -> str:
    content = np.array([*window.inputs, *window.targets], dtype=np.int64).tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


_ROWS = 512
"""Logits taken to float32 at a time, to bound the copies of a large vocabulary."""


def log_likelihoods(
    model: nn.Module, inputs: Int[Tensor, "B L"], targets: Int[Tensor, "B L"]
) -> tuple[Float[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """Return log p(target | inputs up to it) in nats, and whether it is the likeliest token.

    A target of −100 is not counted: 0 and True. Rows may be padded at their end with any token,
    which no causal model's earlier positions see. In float32, or float64 where the model is; the
    answers are on the CPU.

    Raises:
        WakefulError: a logit is NaN or infinite.
    """
    likelihood = torch.zeros(targets.shape, dtype=torch.float64)
    greedy = torch.ones(targets.shape, dtype=torch.bool)
    states, head = states_of(model, inputs)
    if isinstance(head, QuantizedLinear) and head.sees_padding:  # its scale is of all positions
        states, head = head(states), nn.Identity()
    counted = targets != IGNORED
    wanted = counted.flatten().nonzero().flatten()
    which = torch.arange(len(wanted), device=targets.device)
    found = choices(head, states.flatten(0, 1), wanted, which, targets[counted])
    likelihood[counted.cpu()], greedy[counted.cpu()] = found
    return likelihood, greedy


def choices(
    head: Callable[[Tensor], Tensor],
    states: Float[Tensor, "S D"],
    wanted: Int[Tensor, "P"],
    which: Int[Tensor, "T"],
    targets: Int[Tensor, "T"],
) -> tuple[Float[Tensor, "T"], Bool[Tensor, "T"]]:
    """Return the log-probability in nats that state `wanted[which[t]]` gives `targets[t]`, and
    whether that is its likeliest token: as `log_likelihoods`, of states that are there already.

    Raises:
        WakefulError: a logit is NaN or infinite.
    """
    likelihood = torch.zeros(targets.shape, dtype=torch.float64)
    greedy = torch.ones(targets.shape, dtype=torch.bool)
    for start in range(0, len(wanted), _ROWS):
        part = wanted[start : start + _ROWS]
        logits = check_logits(head(states[part]))
        logits = logits if logits.dtype == torch.float64 else logits.float()
        mine = (which >= start) & (which < start + len(part))
        row, target = which[mine] - start, targets[mine]
        chosen = logits[row, target] - logits.logsumexp(1)[row]
        likelihood[mine.cpu()] = chosen.cpu().double()
        greedy[mine.cpu()] = (logits.argmax(1)[row] == target).cpu()
    return likelihood, greedy


def check_causal(name: str, model: nn.Module) -> None:
    """Raise `WakefulError` for a model some of whose tokens see what they are to predict."""
    running.check_causal(name, model)
    prefix = first_target(model)
    if prefix > 1:
        raise WakefulError(
            f"{name} has model.relaxed_prefix = {prefix}: its first tokens "
            "see their own targets, so it gives a text no likelihood; compare validation losses"
        )
