"""The loss on the fixed validation set."""

import contextlib

import polars as pl
import torch
from torch import Tensor

from wakeful.data.order import ValidationWindows, documents_of
from wakeful.data.tokens import Tokens
from wakeful.estimates import Estimate, weighted_mean
from wakeful.model.decoder import Decoder
from wakeful.model.loss import IGNORED
from wakeful.training.parallel import Alone, Parallel
from wakeful.world import ALONE


def evaluate(
    decoder: Decoder,
    windows: ValidationWindows,
    autocast: contextlib.AbstractContextManager[object],
    *,
    cross_documents: bool = True,
) -> pl.DataFrame:
    """Return one row a validation window: `window`, `loss` (mean nats a token), `tokens`.

    Of a task also `optimal`, the loss of the task itself on the same targets.

    The whole set, in its order, each token but the first predicted once, from what its window holds
    before it: of its own document alone unless `cross_documents`. Where the first `relaxed_prefix`
    tokens of a window see each other, the targets among them are not counted.
    """
    return evaluate_over(Alone(decoder, ALONE), windows, autocast, cross_documents=cross_documents)


@torch.no_grad()
def evaluate_over(
    parallel: Parallel,
    windows: ValidationWindows,
    autocast: contextlib.AbstractContextManager[object],
    *,
    cross_documents: bool = True,
) -> pl.DataFrame:
    """Return what `evaluate` does, on every process; the batches are dealt out among them.

    In the last round processes without a batch of their own join in with the first, whose result
    they drop: a model in shares runs on all at once.
    """
    decoder, world = parallel.decoder, parallel.world
    device = decoder.embed.weight.device
    training = decoder.training
    decoder.eval()
    losses = torch.zeros(windows.num_windows, dtype=torch.float64)
    tokens = torch.zeros(windows.num_windows, dtype=torch.int64)
    best: Tensor | None = None
    end_of_text = windows.token_file.end_of_text

    def one_by_one(inputs: Tensor, targets: Tensor) -> Tensor:
        documents = None if cross_documents else documents_of(inputs, end_of_text)
        return decoder.loss(inputs, targets, reduction="none", documents=documents)

    for begin in range(0, len(windows), world.size):
        number = begin + world.rank
        mine = number < len(windows)
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
            best = torch.zeros_like(losses) if best is None else best
            best[rows] = least[:, seen:].sum(1) / tokens[rows]
    parallel.settle()
    decoder.train(training)
    known = any(world.gather(best is not None))
    losses, tokens = world.sum(losses), world.sum(tokens)
    frame = pl.DataFrame(
        {"window": range(len(losses)), "loss": losses.tolist(), "tokens": tokens.tolist()}
    )
    if known:
        best = world.sum(torch.zeros_like(losses) if best is None else best)
        frame = frame.with_columns(optimal=pl.Series(best.tolist()))
    return frame.filter(pl.col("tokens") > 0)


def optimal(token_file: Tokens, inputs: Tensor, targets: Tensor) -> Tensor | None:
    """Return the nats that a task itself loses at each target, (rows, L); None for text.

    Targets of -100 count nothing.
    """
    rows = torch.cat([inputs[:, :1], targets.clamp(min=0)], 1)
    least = token_file.optimal(rows.numpy())
    return None if least is None else torch.from_numpy(least).where(targets != IGNORED, 0.0)


def mean_loss(windows: pl.DataFrame) -> Estimate:
    """Return Σ nll / Σ tokens over windows and its standard error, in nats a token."""
    return weighted_mean(windows["loss"], windows["tokens"])
