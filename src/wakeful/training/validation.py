"""The loss on the validation text, by window, and the loss of a task's own distribution."""

import contextlib
import math

import polars as pl
import torch
from torch import Tensor

from wakeful.data.order import ValidationWindows, number_documents
from wakeful.data.tokens import Tokens
from wakeful.errors import Diverged
from wakeful.estimates import Estimate, finite_or_none, weighted_mean
from wakeful.model.decoder import IGNORED, Decoder
from wakeful.model.evaluating import evaluating
from wakeful.runs.records import ValidationRow
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

    For a synthetic task there is a column `optimal` too, the loss of the task's own distribution on
    the same targets, and for a mixture of texts `domain`.

    The windows cover the whole set in order. Each token but the first is predicted once, from the
    tokens before it in its window; without `cross_documents`, only from those of its own document.

    Every process calls it and takes a part of the batches. In the last round, processes without a
    batch compute the first batch and drop the result: a sharded model needs all processes.
    """
    parallel = model if isinstance(model, Parallel) else Parallel(model)
    decoder, world = parallel.decoder, parallel.world
    device = decoder.embed.weight.device
    losses = torch.zeros(windows.num_windows, dtype=torch.float64)
    tokens = torch.zeros(windows.num_windows, dtype=torch.int64)
    optimal_sums, has_optimal = torch.zeros_like(losses), False
    end_of_text = windows.token_file.end_of_text

    def loss_of_each_token(inputs: Tensor, targets: Tensor) -> Tensor:
        documents = None if cross_documents else number_documents(inputs, end_of_text)
        return decoder.loss(inputs, targets, reduction="none", documents=documents)

    with evaluating(decoder):
        for begin in range(0, len(windows), world.size):
            number = begin + world.rank
            has_batch = number < len(windows)
            progress(begin, len(windows))
            inputs, targets = windows.batch(number if has_batch else 0)
            with autocast:
                token_losses = parallel.call(
                    loss_of_each_token, inputs.to(device), targets.to(device)
                )
            if not has_batch:
                continue
            # The rows of this batch's windows among all windows.
            rows = slice(number * windows.batch_size, number * windows.batch_size + len(inputs))
            tokens[rows] = (targets != IGNORED).sum(1)
            losses[rows] = token_losses.double().sum(1).cpu() / tokens[rows]
            optimal_losses = task_losses(windows.token_file, inputs, targets)
            if optimal_losses is not None:
                has_optimal = True
                optimal_sums[rows] = optimal_losses.sum(1) / tokens[rows]
        parallel.settle()
    progress(len(windows), len(windows))
    losses, tokens, optimal_sums = map(world.sum, (losses, tokens, optimal_sums))
    frame = pl.DataFrame(
        {"window": range(len(losses)), "loss": losses.tolist(), "tokens": tokens.tolist()}
    )
    if any(world.gather(has_optimal)):
        frame = frame.with_columns(optimal=pl.Series(optimal_sums.tolist()))
    domains = windows.domains()
    if domains is not None:
        frame = frame.with_columns(domain=pl.Series(domains))
    return frame.filter(pl.col("tokens") > 0)


def task_losses(token_file: Tokens, inputs: Tensor, targets: Tensor) -> Tensor | None:
    """Return the loss of a synthetic task's own distribution at each target, (B, L), in nats; None
    for text, where it is unknown.

    `inputs` and `targets` are (B, L). At a target of −100, which is not counted, the loss is 0.
    """
    # Target i is input i + 1: with the first input they are whole sequences, (B, L + 1).
    sequences = torch.cat([inputs[:, :1], targets.clamp(min=0)], 1)
    losses = token_file.optimal_losses(sequences.numpy())
    return None if losses is None else torch.from_numpy(losses).where(targets != IGNORED, 0.0)


def mean_loss(windows: pl.DataFrame) -> Estimate:
    """Return Σ nll / Σ tokens over windows and its standard error, in nats per token."""
    return weighted_mean(windows["loss"], windows["tokens"])


def validate(training: Training, step: int) -> tuple[pl.DataFrame, ValidationRow]:
    """Evaluate on the full validation set after a step and record the result in metrics.jsonl;
    return (losses of the windows, the recorded row). Every process calls it.

    Raises:
        Diverged: the loss is not finite.
    """
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
    optimal, excess, excess_error = None, None, None
    if "optimal" in frame.columns:
        optimal, _ = weighted_mean(frame["optimal"], frame["tokens"])
        excess, excess_error = weighted_mean(frame["loss"] - frame["optimal"], frame["tokens"])
    domains = None
    if "domain" in frame.columns:
        parts = frame.partition_by("domain", as_dict=True, maintain_order=True)
        domains = {str(name): mean_loss(part)[0] for (name,), part in parts.items()}
    row = ValidationRow(
        step=step,
        loss=loss,
        standard_error=finite_or_none(error),
        num_windows=len(frame),
        num_tokens=int(frame["tokens"].sum()),
        optimal_loss=optimal,
        excess_loss=excess,
        excess_standard_error=finite_or_none(excess_error),
        domains=domains,
    )
    training.record(row)
    return frame, row


def optimal_loss(training: Training, batch: Tensor) -> float | None:
    """Return the mean loss of a synthetic task's own distribution on the batches of all processes.

    None for text, where it is unknown. None with a teacher too: this loss is to be compared with
    the training loss, which is then not the cross-entropy.
    """
    config, world = training.config, training.world
    if config.train.distill.teacher:
        return None
    losses = task_losses(training.batches.token_file, batch[:, :-1], batch[:, 1:])
    if losses is None:
        return None
    return (world.sum(losses.mean()) / world.size).item()
