"""All metrics of a model on a text, as one tidy table."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import polars as pl
import torch
import torch.nn.functional as F

from wakeful.diagnosis.later_sinks import LaterSink, later_sinks
from wakeful.errors import WakefulError
from wakeful.estimates import mean_and_error
from wakeful.finding import Advice
from wakeful.loading.model import Model
from wakeful.probes.attention import Entropy, FirstAttention, Importance, KeyShares, Sinks, Values
from wakeful.probes.base import Frame, Probe, gather
from wakeful.probes.hidden import BlockInfluence, OutlierChannels, Outliers, Smoothing
from wakeful.probes.rank import Ranks
from wakeful.probes.running import num_layers_of
from wakeful.probes.watch import watch
from wakeful.terminal.display import OnProgress, ignore_progress

DIAGNOSIS_PASSES = 3.0
"""Plain forwards that a diagnosis takes about as long as, most of it for ranks."""
_LABELLED = 24
"""Number of first tokens among which each head's attention is kept."""
_NAMED = 512
"""Number of first tokens whose texts are kept."""


@dataclass(frozen=True)
class ModelDiagnosis:
    """Measurements of one model."""

    name: str
    architecture: str
    num_layers: int
    length: int
    num_sequences: int
    loss: float
    """Mean next-token loss over sequences, in nats per token."""
    loss_error: float
    rows: Frame
    """Metrics: layer, head, position, metric, variant, value, standard_error, kind."""
    tokens: tuple[str, ...] = ()
    """The texts of the first sequence's first tokens."""
    attention: Frame | None = None
    """Every head's weights among the first tokens: layer, head, query, key, value."""
    later_sinks: tuple[LaterSink, ...] = ()
    """Tokens after the first that take more than their share of attention."""
    advice: Advice | None = None
    """Advice as tried on the text; None where nothing is wrong or nothing was tried."""
    quantized: bool = False
    """True where the model is quantized, so that it cannot be cured."""


def diagnose_model(
    loaded: Model,
    sequences: Sequence[Sequence[int]],
    *,
    extra_probes: Iterable[Probe] = (),
    progress: OnProgress = ignore_progress,
) -> ModelDiagnosis:
    """Run a model over sequences and measure the metrics of docs/metrics.md.

    Args:
        loaded: the model.
        sequences: token ids, all of one length, BOS included where the model reads it.
        extra_probes: further probes, whose rows are added. A probe of a class that is used anyway
            is left out.
        progress: called with the number of sequences done and of all.

    Raises:
        WakefulError: the model's loss is not finite.
    """
    first_attention, key_shares = FirstAttention(tokens=_LABELLED), KeyShares()
    probes: list[Probe] = [
        Sinks(),
        Entropy(),
        Importance(),
        Ranks(),
        Values(),
        Outliers(),
        OutlierChannels(),
        Smoothing(),
        BlockInfluence(),
        first_attention,
        key_shares,
    ]
    classes = {type(probe) for probe in probes}
    probes += [probe for probe in extra_probes if type(probe) not in classes]
    losses: list[float] = []
    device = loaded.device
    with torch.inference_mode(), watch(loaded.module, *probes):
        progress(0, len(sequences))
        for done, tokens in enumerate(sequences, start=1):
            ids = torch.tensor([list(tokens)], device=device)
            losses.append(_sequence_loss(loaded, ids))
            progress(done, len(sequences))
    loss, error = mean_and_error(losses)
    return ModelDiagnosis(
        name=loaded.name,
        architecture=loaded.architecture,
        num_layers=num_layers_of(loaded.module),
        length=len(sequences[0]),
        num_sequences=len(sequences),
        loss=loss,
        loss_error=error,
        rows=gather(probes),
        tokens=tuple(loaded.token_text(token) for token in sequences[0][:_NAMED]),
        attention=first_attention.frame(),
        later_sinks=later_sinks(sequences, key_shares.shares, key_shares.masses, loaded.token_text),
    )


def metrics_table(diagnoses: Sequence[ModelDiagnosis]) -> pl.DataFrame:
    """Return all models' rows in one table, with the columns `model` and `sequences` in front."""
    return pl.concat(
        diagnosis.rows.select(
            pl.lit(diagnosis.name).alias("model"),
            pl.lit(diagnosis.num_sequences).alias("sequences"),
            pl.all(),
        )
        for diagnosis in diagnoses
    )


def _sequence_loss(loaded: Model, ids: torch.Tensor) -> float:
    """Return the mean loss of one sequence (1, L) in nats per token.

    Raises:
        WakefulError: the sequence has no token to predict, or the loss is not finite.
    """
    if ids.shape[1] < 2:
        raise WakefulError("a sequence has no token to predict; make them longer (--length)")
    logits = loaded.logits(ids)[0, :-1].float()
    loss = float(F.cross_entropy(logits, ids[0, 1:]))
    if not math.isfinite(loss):
        raise WakefulError(
            f"{loaded.name}'s loss is not finite: the model is damaged, or needs --dtype float32 "
            "or float64"
        )
    return loss
