"""The loss on the validation text, by window, and the least that a task itself loses."""

import contextlib
import math

import polars as pl
import torch
from torch import Tensor

from wakeful.data.order import ValidationWindows, documents_of
from wakeful.data.tokens import Tokens
from wakeful.errors import Diverged
from wakeful.estimates import Estimate, finite, weighted_mean
from wakeful.model.decoder import IGNORED, Decoder
from wakeful.model.evaluating import evaluating
from wakeful.runs.records import Evaluation
from wakeful.terminal.display import OnProgress, ignore_progress
from wakeful.training.parallel import Parallel
from wakeful.training.setup import Training


@torch.no_grad()
def window_losses(
    model: Decoder | Parallel,
    windows: ValidationWindows,
    autocast: contextlib.AbstractContextManager[object],
    *,
    cross_documents: bool = True,
    progress: OnProgress = ignore_progress,
) -> pl.DataFrame:
    """Return one row per validation window: `window`, `loss` (mean nats per token), `tokens`.

    Of a task also `optimal`, the loss of the task itself on the same targets; of a mixture
    `domain`.

    The whole set, in its order, each token but the first predicted once, from what its window holds
    before it: of its own document alone unless `cross_documents`. Where the first `relaxed_prefix`
    tokens of a window see each other, the targets among them are not counted.

    Every process calls it, and the batches are dealt out among them. In the last round processes
    without a batch of their own join in with the first, whose result they drop: a model in shares
    runs on all at once.
    """
    parallel = model if isinstance(model, Parallel) else Parallel(model)
    decoder, world = parallel.decoder, parallel.world
    device = decoder.embed.weight.device
    losses = torch.zeros(windows.num_windows, dtype=torch.float64)
    tokens = torch.zeros(windows.num_windows, dtype=torch.int64)
    best, known = torch.zeros_like(losses), False
    end_of_text = windows.token_file.end_of_text

    def one_by_one(inputs: Tensor, targets: Tensor) -> Tensor:
        documents = None if cross_documents else documents_of(inputs, end_of_text)
        return decoder.loss(inputs, targets, reduction="none", documents=documents)

    with evaluating(decoder):
        for begin in range(0, len(windows), world.size):
            number = begin + world.rank
            mine = number < len(windows)
            progress(begin, len(windows))
            inputs, targets = windows.batch(number if mine else 0)
            with autocast:
                each = parallel.call(one_by_one, inputs.to(device), targets.to(device))
            if not mine:
                continue
            rows = slice(number * windows.batch_size, number * windows.batch_size + len(inputs))
            seen = max(0, decoder.config.relaxed_prefix - 1)
            tokens[rows] = (targets[:, seen:] != IGNORED).sum(1)
            losses[rows] = each.double().sum(1).cpu() / tokens[rows]
            least = optimal(windows.token_file, inputs, targets)
            if least is not None:
                known = True
                best[rows] = least[:, seen:].sum(1) / tokens[rows]
        parallel.settle()
    progress(len(windows), len(windows))
    losses, tokens, best = map(world.sum, (losses, tokens, best))
    frame = pl.DataFrame(
        {"window": range(len(losses)), "loss": losses.tolist(), "tokens": tokens.tolist()}
    )
    if any(world.gather(known)):
        frame = frame.with_columns(optimal=pl.Series(best.tolist()))
    domains = windows.domains()
    if domains is not None:
        frame = frame.with_columns(domain=pl.Series(domains))
    return frame.filter(pl.col("tokens") > 0)


def optimal(token_file: Tokens, inputs: Tensor, targets: Tensor) -> Tensor | None:
    """Return the nats that a task itself loses at each target, (rows, L); None for text.

    Targets of -100 count nothing.
    """
    rows = torch.cat([inputs[:, :1], targets.clamp(min=0)], 1)
    least = token_file.optimal(rows.numpy())
    return None if least is None else torch.from_numpy(least).where(targets != IGNORED, 0.0)


def mean_loss(windows: pl.DataFrame) -> Estimate:
    """Return Σ nll / Σ tokens over windows and its standard error, in nats per token."""
    return weighted_mean(windows["loss"], windows["tokens"])


def validate(training: Training, step: int) -> tuple[pl.DataFrame, Evaluation]:
    """Evaluate on the full validation set and record the result."""
    frame = window_losses(
        training.parallel,
        training.windows,
        training.mixed,
        cross_documents=training.config.data.cross_documents,
    )
    loss, error = mean_loss(frame)
    if not math.isfinite(loss):
        raise Diverged(
            f"the validation loss is {loss} after step {step}; lower optimizer.lr, or look at the "
            "validation text"
        )
    best, over, over_error = None, None, None
    if "optimal" in frame.columns:
        best, _ = weighted_mean(frame["optimal"], frame["tokens"])
        over, over_error = weighted_mean(frame["loss"] - frame["optimal"], frame["tokens"])
    domains = None
    if "domain" in frame.columns:
        parts = frame.partition_by("domain", as_dict=True, maintain_order=True)
        domains = {str(name): mean_loss(part)[0] for (name,), part in parts.items()}
    row = Evaluation(
        step=step,
        loss=loss,
        standard_error=finite(error),
        num_windows=len(frame),
        num_tokens=int(frame["tokens"].sum()),
        optimal_loss=best,
        excess_loss=over,
        excess_standard_error=finite(over_error),
        domains=domains,
    )
    training.record(row)
    return frame, row


def best_loss(training: Training, batch: Tensor) -> float | None:
    """Return the loss of the task itself on a step's tokens.

    None for text, whose own loss nobody knows, and for a loss that is not the cross-entropy.
    """
    config, world = training.config, training.world
    if config.train.distill.teacher:
        return None
    best = optimal(training.batches.token_file, batch[:, :-1], batch[:, 1:])
    if best is None:
        return None
    mean = best[:, max(0, config.model.relaxed_prefix - 1) :].mean()
    return (world.sum(mean) / world.size).item()
