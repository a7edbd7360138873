"""All metrics of a model on a text, as one tidy table."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
import torch.nn.functional as F

from wakeful.config.tables import from_table
from wakeful.diagnosis.later_sinks import LaterSink, later_sinks
from wakeful.errors import WakefulError
from wakeful.estimates import mean_and_error
from wakeful.finding import Advice
from wakeful.loading.model import Model
from wakeful.probes.attention import Entropy, Importance, KeyShares, Leading, Sinks, Values
from wakeful.probes.base import SCHEMA, Frame, Probe, gather
from wakeful.probes.hidden import BlockInfluence, OutlierChannels, Outliers, Smoothing
from wakeful.probes.patterns import AttentionPictures, FirstAttention, HiddenPicture, MeanAttention
from wakeful.probes.rank import Ranks
from wakeful.probes.running import num_layers_of
from wakeful.probes.watch import watch
from wakeful.runs.run import Run, read_frame
from wakeful.terminal.display import OnProgress, ignore_progress

TOKENS, ATTENTION = "tokens.json", "attention.parquet"
"""Files of a diagnosis."""
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
    has_bos: bool = True
    """True where the model's tokenizer has a BOS token."""
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
    tau: float = 0.9,
    lazy_rank: float = 2.0,
    rank_tokens: int = 2048,
    rank_seconds: float = math.inf,
    picture_layers: Sequence[int] = (),
    picture_heads: Sequence[int] = (0, 1, 2, 3),
    extra_probes: Iterable[Probe] = (),
    progress: OnProgress = ignore_progress,
) -> ModelDiagnosis:
    """Run a model over sequences and measure the metrics of docs/metrics.md.

    Args:
        loaded: the model.
        sequences: token ids, all of one length, BOS included where the model reads it.
        tau, lazy_rank, rank_tokens, rank_seconds: see `wakeful.probes.Ranks`.
        picture_layers, picture_heads: layers and heads whose attention is pictured; without layers
            four, spread over the depth.
        extra_probes: probes whose rows are added. A probe of a class that runs anyway is left out.
        progress: called with the number of sequences done, and their number.

    Raises:
        WakefulError: the model lacks some of `picture_layers`, or its loss is not finite.
    """
    num_layers = num_layers_of(loaded.module)
    layers = list(picture_layers) or sorted(
        {round(n * (num_layers - 1) / 3) for n in range(min(4, num_layers))}
    )
    missing = [layer for layer in layers if not 0 <= layer < num_layers]
    if missing:
        raise WakefulError(f"{loaded.name} has layers 0 to {num_layers - 1}, not {missing[0]}")
    probes: list[Probe] = [
        Sinks(),
        Entropy(),
        Importance(),
        Leading(),
        Ranks(tau=tau, lazy_rank=lazy_rank, max_tokens=rank_tokens, seconds=rank_seconds),
        Values(),
        Outliers(),
        OutlierChannels(),
        Smoothing(),
        BlockInfluence(),
        AttentionPictures(layers=layers, heads=picture_heads, size=32),
        MeanAttention(),
        HiddenPicture(tokens=32, bins=192),
        FirstAttention(tokens=_LABELLED),
        KeyShares(),
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
    key_shares = next(probe for probe in probes if isinstance(probe, KeyShares))
    return ModelDiagnosis(
        name=loaded.name,
        architecture=loaded.architecture,
        num_layers=num_layers,
        length=len(sequences[0]),
        num_sequences=len(sequences),
        loss=loss,
        loss_error=error,
        rows=gather(probes),
        tokens=tuple(loaded.token_text(token) for token in sequences[0][:_NAMED]),
        attention=next(p for p in probes if isinstance(p, FirstAttention)).frame(),
        has_bos=loaded.bos is not None,
        later_sinks=later_sinks(sequences, key_shares.shares, key_shares.masses, loaded.token_text),
    )


@dataclass(frozen=True, kw_only=True)
class _ModelFigures:
    """The fields of a model in summary.json from which its diagnosis is read again."""

    model: str
    architecture: str
    layers: int
    length: int
    sequences: int
    loss: float
    loss_standard_error: float | None
    has_bos: bool
    later_sinks: tuple[LaterSink, ...] = ()
    advice: Advice | None = None
    quantized: bool = False


def read_diagnosis(path: str | Path) -> list[ModelDiagnosis]:
    """Return the diagnoses that a run directory holds, one for each model.

    Raises:
        WakefulError: the directory is of another kind of run, or a file is missing or damaged.
    """
    run = Run.open(path)
    run.check_kind("diagnose", "holds no diagnosis")
    rows = read_frame(run.path / "diagnosis.parquet", {"model": pl.String, **SCHEMA})
    record = str(run.path / "summary.json")
    figures = from_table(
        tuple[_ModelFigures, ...], run.read_json("summary.json").get("models"), record=record
    )
    texts = run.read_json(TOKENS)
    weights = read_frame(run.path / ATTENTION, {"model": pl.String, **FirstAttention.COLUMNS})
    return [
        ModelDiagnosis(
            name=model.model, architecture=model.architecture, num_layers=model.layers,
            length=model.length, num_sequences=model.sequences, loss=model.loss,
            loss_error=math.nan if model.loss_standard_error is None else model.loss_standard_error,
            later_sinks=model.later_sinks, advice=model.advice,
            rows=rows.filter(pl.col("model") == model.model).select(*SCHEMA),
            tokens=tuple(map(str, texts.get(model.model, ()))),
            attention=weights.filter(model=model.model).drop("model"),
            has_bos=model.has_bos, quantized=model.quantized,
        )
        for model in figures
    ]  # fmt: skip


def token_files(diagnoses: Sequence[ModelDiagnosis]) -> dict[str, Any]:
    """Return, by file name, what a run directory stores about tokens: their texts for each model,
    and a frame of every head's attention among the first ones.
    """
    files: dict[str, Any] = {
        TOKENS: {diagnosis.name: list(diagnosis.tokens) for diagnosis in diagnoses}
    }
    frames = [
        diagnosis.attention.select(pl.lit(diagnosis.name).alias("model"), pl.all())
        for diagnosis in diagnoses
        if diagnosis.attention is not None
    ]
    if frames:
        files[ATTENTION] = pl.concat(frames)
    return files


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
