"""The loss on the fixed validation set."""

import contextlib

import polars as pl
import torch

from wakeful.data.order import ValidationWindows
from wakeful.model.decoder import Decoder
from wakeful.model.loss import IGNORED
from wakeful.statistics import Estimate, ratio_and_error


@torch.no_grad()
def evaluate(
    decoder: Decoder,
    windows: ValidationWindows,
    autocast: contextlib.AbstractContextManager[object],
) -> pl.DataFrame:
    """Return one row a validation window: `window`, `loss` (mean nats a token), `tokens`.

    The whole set, in its order, each token but the first predicted once. Where the first
    `relaxed_prefix` tokens of a window see each other, the targets among them are not counted.
    """
    device = decoder.embed.weight.device
    training = decoder.training
    decoder.eval()
    losses: list[float] = []
    tokens: list[int] = []
    for inputs, targets in windows:
        with autocast:
            each = decoder.loss(inputs.to(device), targets.to(device), reduction="none")
        blind = targets[:, max(0, decoder.config.relaxed_prefix - 1) :]
        counted = (blind != IGNORED).sum(1)
        losses += (each.double().sum(1).cpu() / counted).tolist()
        tokens += counted.tolist()
    decoder.train(training)
    frame = pl.DataFrame({"window": range(len(losses)), "loss": losses, "tokens": tokens})
    return frame.filter(pl.col("tokens") > 0)


def mean_loss(windows: pl.DataFrame) -> Estimate:
    """Return Σ nll / Σ tokens over windows and its standard error, in nats a token."""
    tokens = windows["tokens"].to_numpy()
    return ratio_and_error(windows["loss"].to_numpy() * tokens, tokens)
