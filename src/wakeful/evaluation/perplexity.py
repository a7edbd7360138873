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

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.loading.model import Model
from wakeful.loading.reading import (
    EvaluationData,
    Window,
    as_evaluation_data,
    check_readable_length,
)
from wakeful.model.decoder import IGNORED
from wakeful.model.finite import check_logits, widened
from wakeful.probes import running
from wakeful.probes.running import states_of
from wakeful.quantization import QuantizedLinear
from wakeful.scores import Score
from wakeful.terminal.display import OnProgress, ignore_progress


def measure_perplexity(
    loaded: Model,
    text: str | EvaluationData,
    *,
    length: int,
    stride: int,
    num_sequences: int = 0,
    bos: bool = False,
    batch_size: int = 4,
    progress: OnProgress = ignore_progress,
) -> list[Score]:
    """Return the scores of a model on a text: its perplexity and its bits per byte, by windows of
    `length` tokens.

    A window starts every `stride` tokens, and each token is counted in the first window that
    predicts it. At most `num_sequences` windows are read, 0 for all. With `bos` each window begins
    with BOS. Bits per byte are left out if the tokenizer does not tell which part of the text a
    token stands for. A synthetic task is read in its validation windows, which begin with BOS and
    do not overlap: `stride` must be `length`. In place of bits per byte it has its loss minus the
    task's entropy.

    Raises:
        WakefulError: the text has fewer than 2 tokens, a window exceeds the model's context,
            `stride` exceeds `length`, the model has no BOS although `bos` is set, or its
            likelihoods mean nothing.
    """
    check_likelihoods(loaded.name, loaded.module)
    check_readable_length(loaded, length, bos=bos)
    if not 1 <= stride <= length:
        raise WakefulError(f"stride = {stride} must be between 1 and the length, {length}")
    data = as_evaluation_data(text)
    windows = data.windows(
        loaded, length=length, stride=stride, num_sequences=num_sequences, bos=bos
    )
    keys = tuple(_window_key(window) for window in windows)
    nats = np.zeros(len(windows))
    progress(0, len(windows))
    for start in range(0, len(windows), batch_size):
        batch = windows[start : start + batch_size]
        nats[start : start + len(batch)] = _negative_log_likelihoods(loaded, batch)
        progress(start + len(batch), len(windows))
    counts = np.array([window.counted for window in windows], float)
    perplexity = Score(
        model=loaded.name, task="text", metric="perplexity", keys=keys, values=nats,
        weights=counts, exponential=True, higher_is_better=False,
    )  # fmt: skip
    return [perplexity, *data.scores(perplexity, windows)]


@torch.inference_mode()
def _negative_log_likelihoods(loaded: Model, batch: list[Window]) -> np.ndarray:
    """Return each window's loss in nats, summed over its counted targets: float64 (windows,).

    Neighboring windows of equal length run together. None is padded: padding would change a
    quantized layer's scale.
    """
    losses: list[np.ndarray] = []
    for _, group in itertools.groupby(batch, lambda window: len(window.inputs)):
        windows = list(group)
        inputs = torch.tensor([window.inputs for window in windows], device=loaded.device)
        targets = torch.tensor([window.targets for window in windows], device=loaded.device)
        losses.append(-log_likelihoods(loaded.module, inputs, targets).sum(1).numpy())
    return np.concatenate(losses)


def _window_key(window: Window) -> str:
    content = np.array([*window.inputs, *window.targets], dtype=np.int64).tobytes()
    return hashlib.sha256(content).hexdigest()[:16]


_ROWS = 512
"""Logits taken to float32 at a time, to bound the copies of a large vocabulary."""


def log_likelihoods(
    model: nn.Module, inputs: Int[Tensor, "B L"], targets: Int[Tensor, "B L"]
) -> Float[Tensor, "B L"]:
    """Return log p(target | inputs up to it) in nats, as a float64 tensor on the CPU; 0 for a
    target of −100, which is not counted.

    It is computed in float32, or in float64 for a model in float64. Rows may be padded at their end
    with any token: a causal model's earlier positions do not see it.

    Raises:
        WakefulError: a logit is NaN or infinite.
    """
    likelihoods = torch.zeros(targets.shape, dtype=torch.float64)
    states, head = states_of(model, inputs)
    if isinstance(head, QuantizedLinear) and head.depends_on_padding:
        # Its scale depends on all positions, so run the head on all of them at once.
        states, head = head(states), nn.Identity()
    states, flat_targets = states.flatten(0, 1), targets.flatten()
    # `_ROWS` positions at a time, because a position's logits span the whole vocabulary.
    for positions in (flat_targets != IGNORED).nonzero().flatten().split(_ROWS):
        logits = widened(check_logits(head(states[positions])))
        target_logits = logits.gather(1, flat_targets[positions, None])[:, 0]
        log_probabilities = target_logits - logits.logsumexp(1)
        likelihoods.view(-1)[positions.cpu()] = log_probabilities.cpu().double()
    return likelihoods


def check_likelihoods(name: str, model: nn.Module) -> None:
    """Raise `WakefulError` if some of the model's tokens attend to their own targets."""
    running.check_causal(name, model)
