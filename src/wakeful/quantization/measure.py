"""Effects of quantization on a model: perplexity, divergence and each layer's error.

Every sequence runs alone, so that a per-tensor scale is of one sequence. Shapes: L tokens of a
sequence, K input channels, N output channels, V vocabulary.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import polars as pl
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from wakeful.device import synchronize
from wakeful.errors import WakefulError
from wakeful.estimates import Estimate, Figure, finite_or_none, mean_and_error, ratio_and_error
from wakeful.model.decoder import Decoder
from wakeful.model.finite import widened
from wakeful.model.hooks import hooked
from wakeful.probes import exact
from wakeful.probes.experts import Experts
from wakeful.probes.huggingface import stream_of
from wakeful.probes.running import block_paths, check_causal, first_target, logits_of, named_blocks
from wakeful.quantization.convert import prepared_as, quantized_layers
from wakeful.quantization.observing import plain_linear

_ROWS = 64
"""Positions whose distributions over the vocabulary are compared at a time."""

LAYER_SCHEMA = {
    "scheme": pl.String,  # "" for what the full-precision model shows
    "module": pl.String,
    "layer": pl.Int64,  # the block; null outside the blocks
    "kind": pl.String,  # the module's name in its block, or "block" for the block's output
    "position": pl.String,  # "first", "rest", "all"
    "metric": pl.String,
    "value": pl.Float64,
    "standard_error": pl.Float64,  # over sequences; null for a single one
}


@dataclass
class Totals:
    """One model's sums over the predicted tokens of each sequence."""

    nll: list[float] = field(default_factory=list)
    divergence: list[float] = field(default_factory=list)
    """KL to the full-precision model."""
    seconds: float = 0.0
    """Seconds of reading; the full-precision model's, which is looked at inside, is not kept."""


@dataclass(frozen=True)
class Measurement:
    """A model and its quantized forms on the same tokens."""

    name: str
    counts: list[int]
    """Predicted tokens of each sequence."""
    full: Totals
    schemes: dict[str, Totals]
    layers: pl.DataFrame

    def perplexity(self, scheme: str = "") -> Estimate:
        """Return exp(Σ nll / Σ tokens) and its error over sequences: perplexity × the loss's."""
        return self._perplexity(scheme).estimate

    def increase(self, scheme: str) -> Estimate:
        """Return perplexity minus the full-precision model's, with the error over sequences."""
        return self._perplexity(scheme).minus(self._perplexity(""))

    def loss_increase(self, scheme: str, baseline: str = "") -> Estimate:
        """Return mean loss minus the full-precision model's in nats per token, paired; or minus
        that of another scheme, the `baseline`.

        e to it is the ratio of perplexities. It stands out from its error sooner than their
        difference does, which the hardest sequences rule.
        """
        base = self.schemes[baseline] if baseline else self.full
        pairs = zip(self.schemes[scheme].nll, base.nll, strict=True)
        return ratio_and_error([nll - before for nll, before in pairs], self.counts)

    def divergence(self, scheme: str) -> Estimate:
        """Return mean KL(full ‖ quantized) in nats per token, with its error over sequences."""
        return ratio_and_error(self.schemes[scheme].divergence, self.counts)

    def _perplexity(self, scheme: str) -> Figure:
        totals = self.schemes[scheme] if scheme else self.full
        return Figure(np.array(totals.nll), np.array(self.counts), exponential=True)


class _Rows:
    """Values of one sequence at a time, to become means with errors."""

    def __init__(self, block_paths: dict[str, tuple[int | None, str]]) -> None:
        self.places = block_paths
        self.values: dict[tuple[str, str, str, str], list[float]] = {}

    def put(self, scheme: str, module: str, metric: str, by_position: dict[str, float]) -> None:
        for position, value in by_position.items():
            self.values.setdefault((scheme, module, position, metric), []).append(value)

    def frame(self) -> pl.DataFrame:
        rows = []
        for (scheme, module, position, metric), values in self.values.items():
            layer, kind = self.places[module]
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
    progress: Callable[[int], None] = lambda done: None,
) -> Measurement:
    """Run a model and its quantized forms over the same sequences.

    `layers` holds, first token and the rest apart: `relative_error` ‖ŷ − y‖ / ‖y‖ of every
    quantized layer, given the full-precision input; `input_kurtosis` of every layer's input and
    `kurtosis` of every block's output, both of the full-precision model. All that an expert reads
    counts as the rest, and experts of one projection have one row, their mean.
    """
    check_causal(name, model)
    # Where projections beside the embeddings are multiplied into them, or experts come apart, the
    # layers that were quantized are those of another form of the model.
    layers = {name for small in quantized.values() for name in quantized_layers(small)}
    unchanged = isinstance(model, Decoder) and not model.embedding.folded_name
    plain = model if unchanged else prepared_as(model, layers)
    # Modules exist once under one name, even if they are called from several places.
    names = block_paths(plain)
    names |= {name: (n, "block") for n, name in enumerate(named_blocks(model))}
    rows = _Rows(names)
    full = Totals()
    totals = {scheme: Totals() for scheme in quantized}
    counts: list[int] = []
    for done, tokens in enumerate(sequences, start=1):
        with _see_layers(plain, quantized, rows), _hiddens(model) as states:
            reference, targets = predicted(model, tokens)
            if plain is not model:
                logits_of(plain, tokens)
        for label, h in states.items():
            rows.put("", label, "kurtosis", _kurtosis_by_position(h))
        counts.append(len(targets))
        full.nll.append(nll(reference, targets))
        for scheme, small in quantized.items():
            before = time.perf_counter()
            logits, _ = predicted(small, tokens)
            synchronize(tokens.device)
            totals[scheme].seconds += time.perf_counter() - before
            totals[scheme].nll.append(nll(logits, targets))
            totals[scheme].divergence.append(summed_divergence(reference, logits))
        progress(done)
    if not all(map(math.isfinite, full.nll)):
        raise WakefulError(
            f"{name}'s loss is not finite even before quantization: "
            "the model is damaged, or needs --dtype float32"
        )
    return Measurement(name=name, counts=counts, full=full, schemes=totals, layers=rows.frame())


def predicted(
    model: nn.Module, tokens: Int[Tensor, "B L"]
) -> tuple[Float[Tensor, "P V"], Int[Tensor, "P"]]:
    """Return the logits of the P tokens of B sequences that are predicted, and these tokens.

    Raises:
        WakefulError: there are none.
    """
    start = first_target(model)
    if tokens.shape[1] <= start:
        raise WakefulError("a sequence has no token to predict; make them longer")
    return logits_of(model, tokens)[:, start - 1 : -1].flatten(0, 1), tokens[:, start:].flatten()


def relative_errors(values: Float[Tensor, "L N"], true: Float[Tensor, "L N"]) -> dict[str, float]:
    """Return ‖found − true‖_F / ‖true‖_F by position; 0 where both are all zero."""
    true = true.float()
    error = (values.float() - true).square().sum(1, dtype=torch.float64)
    size = true.square().sum(1, dtype=torch.float64)
    parts = {"first": slice(0, 1), "rest": slice(1, None), "all": slice(None)}
    sums = {position: (error[part].sum(), size[part].sum()) for position, part in parts.items()}
    return {position: float((e / s).sqrt()) if e else 0.0 for position, (e, s) in sums.items()}


def _kurtosis_by_position(x: Tensor) -> dict[str, float]:
    return {"first": _mean_kurtosis(x[:1]), "rest": _mean_kurtosis(x[1:])}


def _mean_kurtosis(h: Tensor) -> float:
    return float(exact.kurtosis(widened(h)).mean())


@contextmanager
def _see_layers(model: nn.Module, quantized: dict[str, nn.Module], rows: _Rows) -> Iterator[None]:
    """Compare every layer with its quantized forms on what it gets in the full-precision model."""
    forms = {scheme: quantized_layers(small) for scheme, small in quantized.items()}
    named = dict(model.named_modules())
    names = sorted({name for layers in forms.values() for name in layers})

    def see(name: str, args: tuple[Any, ...]) -> None:
        layer = named[name]
        x = args[0].reshape(-1, args[0].shape[-1])
        routed = isinstance(named.get(".".join(name.split(".")[:-2])), Experts)
        label = name.rpartition(".")[0] if routed else name
        kurtosis = {"rest": _mean_kurtosis(x)} if routed else _kurtosis_by_position(x)
        rows.put("", label, "input_kurtosis", kurtosis)
        y = plain_linear(layer, x)
        for scheme, layers in forms.items():
            if name in layers:
                errors = relative_errors(layers[name].linear(x), y)
                if routed:
                    errors = {"rest": errors["all"], "all": errors["all"]}
                rows.put(scheme, label, "relative_error", errors)

    with hooked({name: named[name] for name in names}, before=see):
        yield


@contextmanager
def _hiddens(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Give the output (L, D) of every block of one forward pass, by the block's name."""
    hidden: dict[str, Tensor] = {}

    def see(label: str, _args: tuple[Any, ...], output: object) -> None:
        hidden[label] = stream_of(output)[0]

    with hooked(named_blocks(model), after=see):
        yield hidden


def nll(logits: Float[Tensor, "L V"], targets: Int[Tensor, "L"]) -> float:
    """Return Σ over positions of −ln p(target)."""
    losses = torch.nn.functional.cross_entropy(logits.float(), targets, reduction="none")
    return float(losses.sum(dtype=torch.float64))


def summed_divergence(full: Float[Tensor, "L V"], quantized: Float[Tensor, "L V"]) -> float:
    """Return Σ over positions of Σ_v p (ln p − ln q), p the full-precision model's."""
    total = 0.0
    for rows, quantized_rows in zip(full.split(_ROWS), quantized.split(_ROWS), strict=True):
        p, q = rows.float().log_softmax(-1), quantized_rows.float().log_softmax(-1)
        total += float((p.exp() * (p - q)).sum(dtype=torch.float64))
    return total


@torch.inference_mode()
def losses_and_divergences(
    model: nn.Module,
    text: Sequence[Int[Tensor, "1 L"]],
    full_logits: Sequence[Float[Tensor, "P V"]] = (),
) -> tuple[Float[Tensor, "S"], Float[Tensor, "S"]]:
    """Return the mean loss of each of S sequences, and its KL from `full_logits` where given."""
    losses, kl = [], []
    for number, tokens in enumerate(text):
        logits, targets = predicted(model, tokens)
        losses.append(nll(logits, targets) / len(logits))
        kl.append(
            summed_divergence(full_logits[number], logits) / len(logits) if full_logits else 0.0
        )
    return torch.tensor(losses, dtype=torch.float64), torch.tensor(kl, dtype=torch.float64)


@torch.no_grad()
def divergences(
    model: nn.Module, quantized: Sequence[nn.Module], text: Sequence[Int[Tensor, "1 L"]]
) -> list[list[float]]:
    """Return KL(model ‖ other) of each other model on each sequence, in nats per token."""
    kl: list[list[float]] = [[] for _ in quantized]
    for tokens in text:
        full = predicted(model, tokens)[0]
        for values, small in zip(kl, quantized, strict=True):
            values.append(summed_divergence(full, predicted(small, tokens)[0]) / len(full))
    return kl
