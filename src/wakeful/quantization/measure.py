"""Effects of quantization on a model: perplexity, divergence and each layer's error.

Every sequence runs alone, so that a per-tensor scale is computed from it. Shapes: L tokens
of a sequence, K input channels, N output channels, V vocabulary.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.estimates import Estimate, Figure, finite_or_none, mean_and_error, ratio_and_error
from wakeful.model.decoder import Decoder
from wakeful.model.finite import widened
from wakeful.model.hooks import hooked
from wakeful.probes import exact
from wakeful.probes.experts import Experts
from wakeful.probes.running import block_paths, check_causal, logits_of
from wakeful.quantization.calibration import linear_product
from wakeful.quantization.convert import prepare_model, quantized_layers
from wakeful.terminal.display import OnProgress, ignore_progress

_ROWS = 64
"""Positions whose distributions over the vocabulary are compared at a time."""

LAYER_SCHEMA = {
    "scheme": pl.String,  # "" for figures of the full-precision model
    "module": pl.String,
    "layer": pl.Int64,  # the block; null outside the blocks
    "kind": pl.String,  # the module's name in its block
    "position": pl.String,  # "first", "rest", "all"
    "metric": pl.String,
    "value": pl.Float64,
    "standard_error": pl.Float64,  # over sequences; null for a single one
}


@dataclass
class Totals:
    """One model's sums over the predicted tokens of each sequence, in nats."""

    nll: list[float] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)
    """KL from the full-precision model."""

    def add(
        self, logits: Float[Tensor, "P V"], targets: Int[Tensor, "P"], full: Float[Tensor, "P V"]
    ) -> None:
        """Add a sequence, by the model's logits, those of the full-precision model, and the tokens
        to predict.
        """
        self.nll.append(total_nll(logits, targets))
        self.divergence.append(total_kl(full, logits))


@dataclass(frozen=True)
class Measurement:
    """Losses of a model and its quantized versions on the same tokens, and the errors of layers."""

    name: str
    counts: list[int]
    """Predicted tokens of each sequence."""
    full: Totals
    schemes: dict[str, Totals]
    layers: pl.DataFrame

    def perplexity(self, scheme: str = "") -> Estimate:
        """Return the perplexity exp(Σ nll / Σ tokens) under a scheme ("" for full precision), with
        its standard error over sequences: the perplexity × the standard error of the loss.
        """
        return self._perplexity(scheme).estimate

    def perplexity_increase(self, scheme: str) -> Estimate:
        """Return a scheme's perplexity minus the full-precision model's, with its standard error
        over sequences.
        """
        return self._perplexity(scheme).minus(self._perplexity(""))

    def loss_increase(self, scheme: str, baseline: str = "") -> Estimate:
        """Return a scheme's mean loss minus that of the scheme `baseline` ("" for full precision).

        It is in nats per token, with its standard error over paired sequences. exp of the increase
        is the ratio of the perplexities. A difference of perplexities is dominated by the hardest
        sequences, so its standard error is larger in proportion.
        """
        base = self.schemes[baseline] if baseline else self.full
        return self.loss_difference(self.schemes[scheme], base)

    def loss_difference(self, totals: Totals, baseline: Totals) -> Estimate:
        """Return a model's mean loss minus another's on the same sequences, in nats per token, with
        its standard error over paired sequences.
        """
        pairs = zip(totals.nll, baseline.nll, strict=True)
        return ratio_and_error([nll - base_nll for nll, base_nll in pairs], self.counts)

    def divergence(self, scheme: str) -> Estimate:
        """Return a scheme's mean KL(full ‖ quantized) in nats per token, with its standard error
        over sequences.
        """
        return self.mean_kl(self.schemes[scheme])

    def mean_kl(self, totals: Totals) -> Estimate:
        """Return a model's mean KL from the full-precision model, as `divergence` does."""
        return ratio_and_error(totals.divergence, self.counts)

    def _perplexity(self, scheme: str) -> Figure:
        """Return the perplexity under a scheme ("" for full precision), by sequence."""
        totals = self.schemes[scheme] if scheme else self.full
        return Figure(np.array(totals.nll), np.array(self.counts), exponential=True)


class _LayerFigures:
    """Figures of layers, collected one sequence at a time, as means with standard errors."""

    def __init__(self, block_paths: dict[str, tuple[int | None, str]]) -> None:
        self.block_paths = block_paths
        self.values: dict[tuple[str, str, str, str], list[float]] = {}

    def add(self, scheme: str, module: str, metric: str, by_position: dict[str, float]) -> None:
        """Add a layer's figures (`metric`) of one sequence, by position: "first", "rest" or "all".

        `scheme` is "" for figures of the full-precision model.
        """
        for position, value in by_position.items():
            self.values.setdefault((scheme, module, position, metric), []).append(value)

    def to_frame(self) -> pl.DataFrame:
        """Return a table of the means over sequences and their standard errors, with the columns of
        `LAYER_SCHEMA`.
        """
        rows = []
        for (scheme, module, position, metric), values in self.values.items():
            layer, kind = self.block_paths[module]
            mean, error = mean_and_error(values)
            rows.append(
                (scheme, module, layer, kind, position, metric, mean, finite_or_none(error))
            )
        return pl.DataFrame(rows, schema=LAYER_SCHEMA, orient="row")


@torch.inference_mode()
def measure_damage(
    name: str,
    model: nn.Module,
    quantized: dict[str, nn.Module],
    sequences: Sequence[Int[Tensor, "1 L"]],
    *,
    rotated: Mapping[str, nn.Module] | None = None,
    on_progress: OnProgress = ignore_progress,
) -> Measurement:
    """Compare a model, called `name`, with its quantized versions (by scheme name) on the same
    sequences.

    `rotated` has, by scheme name, the full-precision models of those versions that are quantized
    from another model with the same function, whose layers differ from those of `model`.

    The result's table `layers` has two metrics, for the first token and the rest separately:
    `relative_error`, ‖ŷ − y‖ / ‖y‖ of every quantized layer given the full-precision input, and
    `input_kurtosis` of every quantized layer's input in the full-precision model; for a model of
    `rotated` it stands under the scheme's name, else under "". All tokens of an expert count as the
    rest, and the experts of one projection have one row, their mean.

    Raises:
        WakefulError: the model is not causal, a sequence has fewer than two tokens, or the
            full-precision loss is not finite.
    """
    check_causal(name, model)
    # `prepared` is the full-precision model with the layers that were quantized. `model` may lack
    # them: before quantizing, experts are unfused, and a folded embedding unties the head.
    has_these_layers = isinstance(model, Decoder) and not model.embedding.folded_name
    prepared = model if has_these_layers else prepare_model(model)
    rotated = {scheme: prepare_model(full_model) for scheme, full_model in (rotated or {}).items()}
    not_rotated = {name: module for name, module in quantized.items() if name not in rotated}
    paths = block_paths(prepared)
    for full_model in rotated.values():
        paths |= block_paths(full_model)
    figures = _LayerFigures(paths)
    full = Totals()
    totals = {scheme: Totals() for scheme in quantized}
    counts: list[int] = []
    on_progress(0, len(sequences))
    for done, tokens in enumerate(sequences, start=1):
        with _record_layer_errors(prepared, not_rotated, figures):
            reference, targets = logits_and_targets(model, tokens)
            if prepared is not model:
                logits_of(prepared, tokens)  # only its layers are watched
        for scheme, full_model in rotated.items():
            layers = {scheme: quantized[scheme]}
            with _record_layer_errors(full_model, layers, figures, kurtosis_of=scheme):
                logits_of(full_model, tokens)
        counts.append(len(targets))
        full.nll.append(total_nll(reference, targets))
        for scheme, quantized_model in quantized.items():
            logits, _ = logits_and_targets(quantized_model, tokens)
            totals[scheme].add(logits, targets, reference)
        on_progress(done, len(sequences))
    if not all(map(math.isfinite, full.nll)):
        raise WakefulError(
            f"{name}'s loss is not finite even before quantization: "
            "the model is damaged, or needs --dtype float32"
        )
    return Measurement(
        name=name, counts=counts, full=full, schemes=totals, layers=figures.to_frame()
    )


@torch.inference_mode()
def measure_losses(
    name: str, model: nn.Module, full_model: nn.Module, sequences: Sequence[Int[Tensor, "1 L"]],
    *, on_progress: OnProgress = ignore_progress,
) -> Totals:  # fmt: skip
    """Return the losses of a model, called `name`, and its KL from a full-precision model, by
    sequence.

    Where one model's vocabulary has more entries, as padding adds them, those are left out.

    Raises:
        WakefulError: a token of the text is not in the model's vocabulary.
    """
    totals = Totals()
    first_token = torch.zeros_like(sequences[0][:, :1])
    size = min(logits_of(each, first_token).shape[-1] for each in (model, full_model))
    if (largest := max(int(tokens.max()) for tokens in sequences)) >= size:
        raise WakefulError(
            f"{name} predicts {size:,} different tokens, and the text has token {largest:,}: name "
            "a quantized version of the same model"
        )
    for done, tokens in enumerate(sequences, start=1):
        full, targets = logits_and_targets(full_model, tokens)
        logits, _ = logits_and_targets(model, tokens)
        totals.add(logits[:, :size], targets, full[:, :size])
        on_progress(done, len(sequences))
    return totals


def logits_and_targets(
    model: nn.Module, tokens: Int[Tensor, "B L"]
) -> tuple[Float[Tensor, "P V"], Int[Tensor, "P"]]:
    """Return (logits, ids) of the P = B · (L − 1) predicted tokens of B sequences.

    Raises:
        WakefulError: the sequences are too short to predict any token.
    """
    if tokens.shape[1] < 2:
        raise WakefulError("a sequence has no token to predict; make them longer")
    logits = logits_of(model, tokens)[:, :-1]  # each is for the next token
    return logits.flatten(0, 1), tokens[:, 1:].flatten()


def relative_errors(values: Float[Tensor, "L N"], true: Float[Tensor, "L N"]) -> dict[str, float]:
    """Return ‖values − true‖_F / ‖true‖_F over the first token ("first"), all later ones ("rest")
    and all tokens ("all").

    It is 0 where the two are equal, even if both are all zeros.
    """
    true = true.float()
    squared_error = (values.float() - true).square().sum(1, dtype=torch.float64)
    squared_norm = true.square().sum(1, dtype=torch.float64)
    positions = {"first": slice(0, 1), "rest": slice(1, None), "all": slice(None)}
    errors: dict[str, float] = {}
    for position, tokens in positions.items():
        error_sum, norm_sum = squared_error[tokens].sum(), squared_norm[tokens].sum()
        errors[position] = float((error_sum / norm_sum).sqrt()) if error_sum else 0.0  # not 0/0
    return errors


def _kurtosis_by_position(x: Tensor) -> dict[str, float]:
    return {"first": _mean_kurtosis(x[:1]), "rest": _mean_kurtosis(x[1:])}


def _mean_kurtosis(h: Tensor) -> float:
    return float(exact.kurtosis(widened(h)).mean())


@contextmanager
def _record_layer_errors(
    model: nn.Module,
    quantized: dict[str, nn.Module],
    figures: _LayerFigures,
    kurtosis_of: str = "",
) -> Iterator[None]:
    """Add figures of the quantized layers to `figures` whenever the full-precision `model` runs in
    the context.

    They are the kurtosis of the layer's input, under the scheme `kurtosis_of`, and, for each model
    in `quantized` (by scheme) that has the layer quantized, the relative error of its output.

    A layer of the full-precision model and the layer of its name in each quantized model get the
    same input: that of the full-precision model.
    """
    layers_by_scheme = {
        scheme: quantized_layers(quantized_model) for scheme, quantized_model in quantized.items()
    }
    modules = dict(model.named_modules())
    names = sorted({name for layers in layers_by_scheme.values() for name in layers})

    def compare(name: str, args: tuple[Any, ...]) -> None:
        """Add the figures of one call of a layer; a hook before its forward."""
        x = args[0].reshape(-1, args[0].shape[-1])
        # An expert's layer is called "....mlp.experts.gate_proj.3"; all experts of a projection
        # have one row in the table, under the projection's name.
        projection, _, _ = name.rpartition(".")
        experts, _, _ = projection.rpartition(".")
        is_expert = isinstance(modules.get(experts), Experts)
        label = projection if is_expert else name
        # An expert reads tokens from anywhere in the sequence: there is no first one.
        kurtosis = {"rest": _mean_kurtosis(x)} if is_expert else _kurtosis_by_position(x)
        figures.add(kurtosis_of, label, "input_kurtosis", kurtosis)
        y = linear_product(modules[name], x)
        for scheme, layers in layers_by_scheme.items():
            if name in layers:
                errors = relative_errors(layers[name].linear(x), y)
                if is_expert:
                    errors = {"rest": errors["all"], "all": errors["all"]}
                figures.add(scheme, label, "relative_error", errors)

    with hooked({name: modules[name] for name in names}, before=compare):
        yield


def total_nll(logits: Float[Tensor, "L V"], targets: Int[Tensor, "L"]) -> float:
    """Return the negative log-likelihood of the targets, summed over positions, in nats."""
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    return float(losses.sum(dtype=torch.float64))


def total_kl(full: Float[Tensor, "L V"], quantized: Float[Tensor, "L V"]) -> float:
    """Return KL(full ‖ quantized) = Σ_v p (ln p − ln q) between next-token distributions, given
    both models' logits, summed over positions.
    """
    total = 0.0
    # A few positions at a time, to save memory.
    for rows, quantized_rows in zip(full.split(_ROWS), quantized.split(_ROWS), strict=True):
        p, q = rows.float().log_softmax(-1), quantized_rows.float().log_softmax(-1)
        total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
    return total


@torch.inference_mode()
def loss_and_kl_per_sequence(
    model: nn.Module,
    text: Sequence[Int[Tensor, "1 L"]],
    full_logits: Sequence[Float[Tensor, "P V"]] = (),
) -> tuple[Float[Tensor, "S"], Float[Tensor, "S"]]:
    """Return a model's (mean loss, mean KL from the full-precision model) on each of S sequences.

    Both are in nats per token. `full_logits` are the full-precision model's logits for each
    sequence; without them KL is not computed, and zeros are returned.
    """
    losses: list[float] = []
    kl: list[float] = []
    for index, tokens in enumerate(text):
        logits, targets = logits_and_targets(model, tokens)
        losses.append(total_nll(logits, targets) / len(logits))
        kl.append(total_kl(full_logits[index], logits) / len(logits) if full_logits else 0.0)
    return torch.tensor(losses, dtype=torch.float64), torch.tensor(kl, dtype=torch.float64)


@torch.no_grad()
def kl_per_sequence(
    model: nn.Module,
    quantized_models: Sequence[nn.Module],
    text: Sequence[Int[Tensor, "1 L"]],
) -> list[list[float]]:
    """Return KL(model ‖ quantized) in nats per token: a list for each quantized model, with a
    number for each sequence.
    """
    kl: list[list[float]] = [[] for _ in quantized_models]
    for tokens in text:
        full = logits_and_targets(model, tokens)[0]
        for values, quantized_model in zip(kl, quantized_models, strict=True):
            logits = logits_and_targets(quantized_model, tokens)[0]
            values.append(total_kl(full, logits) / len(full))
    return kl
