"""Search for the smallest mixed model: one format per group of layers, within a budget of bits,
bytes or loss.

Layers are quantized to every format that the engine runs; one backward pass scores them; a knapsack
chooses the formats; and the result is compared with uniform formats on other text.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.probes.experts import with_modules
from wakeful.quantization.allocation import Allocation, FormatChoice, Frontier
from wakeful.quantization.convert import scheme_of
from wakeful.quantization.engines import VLLM, EngineFormats
from wakeful.quantization.formats import LayersByFormat, matrix_bytes, quantize_layers, scheme_fits
from wakeful.quantization.gguf_file import EmbeddingTable
from wakeful.quantization.groups import fused_groups
from wakeful.quantization.linear import QuantizedLinear, quantize_layer, weight_and_bias
from wakeful.quantization.measure import kl_per_sequence, loss_and_kl_per_sequence
from wakeful.quantization.rotation_choice import RotationChoice
from wakeful.quantization.schemes import Scheme
from wakeful.quantization.scores import Scores, score_formats
from wakeful.quantization.tuning import (
    Tuning,
    copy_with_own_scales,
    is_tunable,
    split_sequences,
    tune_scales,
)
from wakeful.terminal.display import OnProgress, ignore_progress

MIXED = "mixed"
"""Name of the model whose layers have different formats."""
_ROUNDS = 5
"""Allocations that are tried to meet a loss."""


@dataclass(frozen=True)
class Budget:
    """The limit that a mixed model must keep: exactly one of the fields is not 0."""

    bits: float = 0.0
    """Bits per weight of the layers, scales included, without embeddings and the head."""
    bytes: int = 0
    """Bytes of the whole file."""
    loss: float = 0.0
    """Loss increase in nats per token."""


@dataclass(frozen=True)
class MixedModel:
    """A quantized model with a format for each layer, and models of one format to compare with."""

    full_model: nn.Module
    """The model in full precision."""
    module: nn.Module
    """The model with the chosen formats."""
    embeddings: Mapping[str, QuantizedLinear]
    """The embeddings that are quantized."""
    engine: EngineFormats
    formats: Mapping[str, str]
    """The name of each layer's format."""
    uniform_models: Mapping[str, nn.Module]
    """Models with all layers in one format, by its name: the smallest one that is not smaller than
    the chosen formats, and those that are.
    """
    uniform_bytes: Mapping[str, int]
    """Bytes of each uniform model's file."""
    allocation: Allocation
    frontier: Sequence[tuple[int, float]]
    """Bytes of the layers and predicted cost of the best allocations for many budgets."""
    num_weights: int
    """Number of the layers' weights."""
    other_bytes: int
    """Bytes of what is not quantized: norms, and mostly embeddings and the head."""
    stored_dtype: torch.dtype
    """Type in which that is stored."""
    rotation: RotationChoice | None = None
    """The choice of a rotation of the model before it was quantized, where one was asked for. The
    uniform models are not rotated."""
    tuning: Tuning | None = None
    """Result of training the scales, where requested."""

    @property
    def rotation_name(self) -> str:
        """Name of the rotation of the model, "" for none."""
        return "" if self.rotation is None else self.rotation.name

    @property
    def bits(self) -> float:
        """Bits per weight of the layers, scales included."""
        return 8 * self.allocation.bytes / self.num_weights

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The mixed model and the uniform ones, by name."""
        return {MIXED: self.module, **self.uniform_models}

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of each model's file, by the model's name."""
        return {MIXED: self.allocation.bytes + self.other_bytes, **self.uniform_bytes}

    @property
    def schemes(self) -> dict[str, Scheme]:
        """The scheme of each model, by the model's name.

        The mixed model has several; the scheme that most of its layers have stands for them.
        """
        commonest = scheme_of(self.module)
        assert commonest is not None
        uniform = {name: self.engine.schemes[name] for name in self.uniform_models}
        return {MIXED: commonest, **uniform}

    @property
    def counts(self) -> dict[str, int]:
        """Number of layers in each format, by the format's name; formats of no layer are left out.

        The formats are in the engine's order, full precision last.
        """
        counts = Counter(self.formats.values())
        names = (*self.engine.schemes, self.engine.full_precision)
        return {name: counts[name] for name in names if counts[name]}


@dataclass(frozen=True)
class Candidates:
    """A model's layers in every format that fits them, with bytes and estimated costs."""

    layers: Mapping[str, nn.Module]
    engine: EngineFormats
    weight_bytes: int
    """Bytes of one weight in full precision, as it is stored."""
    formats: LayersByFormat = field(default_factory=dict)
    scores: Scores = field(default_factory=dict)
    """Estimated costs; empty before layers are scored: then all costs are 0."""

    @cached_property
    def groups(self) -> list[tuple[str, ...]]:
        """Names of the layers, in groups whose layers must all have the same format.

        If the engine fuses no layers, every layer is a group by itself.
        """
        if self.engine.fuses_layers:
            return fused_groups(self.layers)
        return [(name,) for name in self.layers]

    @cached_property
    def format_names(self) -> list[list[str]]:
        """For each group, the names of the formats that fit all its layers, full precision last."""
        names_by_group: list[list[str]] = []
        for group in self.groups:
            layers = [self.layers[name] for name in group]
            names = [
                name for name, scheme in self.engine.schemes.items()
                if all(scheme_fits(layer, scheme) for layer in layers)
            ]  # fmt: skip
            names_by_group.append([*names, self.engine.full_precision])
        return names_by_group

    @cached_property
    def choices(self) -> list[list[FormatChoice]]:
        """For each group, its bytes and cost in each of its formats, in the order of
        `format_names`.
        """
        return [
            [self.format_choice(name, group) for name in names]
            for names, group in zip(self.format_names, self.groups, strict=True)
        ]

    @cached_property
    def uniform_choices(self) -> dict[str, FormatChoice]:
        """Bytes and cost of all layers in one format, for each quantized format that fits them all.

        The formats are in increasing order of bytes.
        """
        names_that_fit_all = set[str].intersection(*map(set, self.format_names))
        names_that_fit_all.discard(self.engine.full_precision)  # it fits too, but is not quantized
        choices = {name: self.format_choice(name, self.layers) for name in names_that_fit_all}
        return dict(sorted(choices.items(), key=lambda item: item[1].bytes))

    @property
    def num_weights(self) -> int:
        """Number of the layers' weights."""
        return sum(weight_and_bias(layer)[0].numel() for layer in self.layers.values())

    def format_choice(self, format_name: str, layer_names: Iterable[str]) -> FormatChoice:
        """Return the bytes and the cost of some layers, together, in one format.

        Full precision costs nothing; before layers are scored, all other formats cost nothing too.
        """
        names = list(layer_names)
        shapes = [weight_and_bias(self.layers[name])[0].shape for name in names]
        if format_name == self.engine.full_precision:
            return FormatChoice(self.weight_bytes * sum(math.prod(shape) for shape in shapes), 0.0)
        size = sum(matrix_bytes(self.engine.schemes[format_name], *shape) for shape in shapes)
        scores = self.scores.get(format_name, {})
        return FormatChoice(size, sum(scores.get(name, 0.0) for name in names))

    def formats_by_layer(self, allocation: Allocation) -> dict[str, str]:
        """Return the name of each layer's format in an allocation, by the layer's name."""
        formats: dict[str, str] = {}
        choices = zip(self.groups, self.format_names, allocation.choice_indices, strict=True)
        for group, names, index in choices:
            formats |= dict.fromkeys(group, names[index])
        return formats

    def uniform_allocation(self, format_name: str, bound: float) -> Allocation:
        """Return the allocation of one format to all layers.

        `bound` is stored in it: a lower bound on the cost of any allocation within the budget.
        """
        indices = tuple(names.index(format_name) for names in self.format_names)
        choice = self.uniform_choices[format_name]
        return Allocation(indices, choice.bytes, choice.cost, bound)


@dataclass(frozen=True, eq=False)
class FormatSearch:
    """Search for the formats of one model's layers; `find_formats` runs it."""

    model: nn.Module
    layers: Mapping[str, nn.Module]
    budget: Budget
    rounding_text: Sequence[Int[Tensor, "1 L"]]
    """Sequences of which statistics are collected to round layers."""
    selection_text: Sequence[Int[Tensor, "1 L"]]
    """Sequences on which formats are scored and compared."""
    model_bytes: int
    """Bytes of the model in full precision, as it is stored."""
    stored_dtype: torch.dtype
    engine: EngineFormats = VLLM
    embeddings: Mapping[str, EmbeddingTable] = field(default_factory=dict)
    """Embeddings to quantize too."""
    tuning_steps: int = 0
    """Steps of training the scales."""
    tuning_text: Sequence[Int[Tensor, "1 L"]] = ()
    """Sequences to train scales on; every ninth helps to decide whether training helped."""
    tuning_state: Path | None = None
    """File that keeps the state of that training."""
    unrotated: "FormatSearch | None" = None
    """Search of the model before it was rotated, whose uniform models the result is compared with;
    None for a model that is not rotated."""
    _quantized_layers: LayersByFormat = field(default_factory=dict, init=False)
    """Layers and embeddings that are quantized already, by format; see `_quantize_to`."""
    on_rounding: OnProgress = ignore_progress
    on_tuning: OnProgress = ignore_progress

    @cached_property
    def unscored(self) -> Candidates:
        """The layers, and the embeddings to quantize, with their bytes in every format.

        None of them is quantized or scored yet.
        """
        embeddings = {name: table.linear for name, table in self.embeddings.items()}
        layers = {**self.layers, **embeddings}
        return Candidates(layers, self.engine, self.stored_dtype.itemsize)

    @property
    def other_bytes(self) -> int:
        """Bytes of everything in the model but the layers and embeddings to quantize."""
        return self.model_bytes - self.unscored.num_weights * self.stored_dtype.itemsize

    @property
    def nearest_uniform_format(self) -> str:
        """Name of the largest format of all layers within the budget, or, if there is none or the
        budget is of loss, of the smallest. If no format fits all layers, it is the smallest that
        fits any.

        Raises:
            WakefulError: no format fits any layer.
        """
        choices = self.unscored.uniform_choices  # the smallest first
        if not choices:
            if not self._names_in_use:
                raise WakefulError(
                    "none of the formats fits a layer: name others, or smaller groups"
                )
            return self._names_in_use[0]
        smallest = next(iter(choices))
        if self.budget.loss:
            return smallest
        within = [name for name, choice in choices.items() if choice.bytes <= self.layer_budget]
        return within[-1] if within else smallest

    @property
    def _names_in_use(self) -> list[str]:
        """Names of the formats that fit at least one group of layers, the smallest first."""
        fitting = {name for names in self.unscored.format_names for name in names}
        return [name for name in self.engine.schemes if name in fitting]

    @property
    def layer_budget(self) -> int:
        """Bytes that the layers to quantize may take together, for a budget of bits or bytes."""
        if self.budget.bits:
            return math.floor(self.budget.bits * self.unscored.num_weights / 8)
        return self.budget.bytes - self.other_bytes

    def check(self) -> None:
        """Check the search before anything is quantized. A budget of loss is not checked.

        Raises:
            WakefulError: the smallest formats exceed the budget, full precision meets it already,
                or scales are to be trained and no format has scales that can be.
        """
        if self.tuning_steps and not any(map(is_tunable, self.engine.schemes.values())):
            raise WakefulError(
                "tune: the scales of these formats are powers of two, which cannot be trained: "
                "leave --tune out, or name another format"
            )
        if self.budget.loss:  # only measured losses show whether it can be met
            return
        min_bytes = sum(min(each.bytes for each in group) for group in self.unscored.choices)
        min_bits = f"{8 * min_bytes / self.unscored.num_weights:.2f} bits per weight"
        if self.layer_budget < min_bytes:
            if self.budget.bits:
                raise WakefulError(
                    f"bits = {self.budget.bits:g} are too few: in their smallest formats the "
                    f"layers take {min_bits}"
                )
            raise WakefulError(
                f"bytes = {self.budget.bytes:,} are too few: the layers take {min_bytes:,} in "
                f"their smallest formats ({min_bits}), all else {self.other_bytes:,}"
            )
        all_layers, full_precision = self.unscored.layers, self.engine.full_precision
        if self.layer_budget >= self.unscored.format_choice(full_precision, all_layers).bytes:
            raise WakefulError(
                "the model fits in full precision, so there is nothing to quantize: ask for fewer "
                "bits or bytes"
            )

    def find_formats(self) -> MixedModel:
        """Return the model with the best formats within the budget.

        If `tuning_steps` is not 0, its scales are trained, and its field `tuning` is set.

        Raises:
            WakefulError: see `check`; or no formats that were tried meet a budget of loss.
        """
        self.check()
        mixed_model = self._choose_formats()
        # Layers in the formats that were not chosen are released: training needs memory.
        for search in (self, self.unrotated):
            if search is not None:
                search._quantized_layers.clear()
        if not self.tuning_steps:
            return mixed_model
        training, validation = split_sequences(self.tuning_text)
        tuning = tune_scales(
            self.model, mixed_model.module, training or self.rounding_text,
            [*self.selection_text, *validation],
            steps=self.tuning_steps, state=self.tuning_state, on_progress=self.on_tuning,
        )  # fmt: skip
        return replace(mixed_model, tuning=tuning)

    def _choose_formats(self) -> MixedModel:
        """Quantize the layers to all formats, and return the model with the best formats within the
        budget, together with the uniform models to compare it with. Scales are not trained.

        Raises:
            WakefulError: no formats that were tried meet a budget of loss.
        """
        candidates = self._score_candidates()
        frontier = Frontier(candidates.choices)
        if self.budget.loss:
            allocation = self._search_within_loss(candidates, frontier)
        else:
            allocation = frontier.within_bytes(self.layer_budget)
            allocation = self._compare_with_uniform(candidates, allocation)
        formats = candidates.formats_by_layer(allocation)
        # With a budget of bits or bytes `check` has refused a model that fits in full precision.
        if set(formats.values()) == {self.engine.full_precision}:
            raise WakefulError(
                "every format raises the loss by more than --loss allows: allow a larger increase"
            )
        quantized_embeddings = {
            name: candidates.formats[formats[name]][name]
            for name in self.embeddings
            if formats[name] != self.engine.full_precision
        }
        # To compare with: the uniform formats that are smaller, and the first that is not, if any.
        compared, file_bytes = self.unrotated or self, allocation.bytes + self.other_bytes
        uniform_bytes = {
            name: choice.bytes + compared.other_bytes
            for name, choice in compared.unscored.uniform_choices.items()
        }
        num_smaller = sum(size < file_bytes for size in uniform_bytes.values())
        uniform_bytes = dict(list(uniform_bytes.items())[: num_smaller + 1])
        return MixedModel(
            full_model=self.model, module=self._build_model(candidates, formats),
            engine=self.engine, formats=formats, allocation=allocation,
            embeddings=quantized_embeddings,
            uniform_models=compared._build_uniform(list(uniform_bytes)),
            uniform_bytes=uniform_bytes,
            frontier=frontier.curve(), num_weights=candidates.num_weights,
            other_bytes=self.other_bytes, stored_dtype=self.stored_dtype,
        )  # fmt: skip

    def _score_candidates(self) -> Candidates:
        """Return the candidates in every format, with the estimated cost of each layer and
        embedding in it on the selection text.
        """
        candidates = self._quantize_to(self._names_in_use)
        scores = score_formats(
            self.model, self.layers, candidates.formats, self.selection_text,
            tables=self.embeddings,
        )  # fmt: skip
        return replace(candidates, scores=scores)

    def uniform_kl(self, format_name: str) -> list[float]:
        """Return KL(full precision ‖ quantized) in nats per token for each sequence of the
        selection text, with the layers and embeddings that a format fits quantized to it.
        """
        modules = list(self._build_uniform([format_name]).values())
        return kl_per_sequence(self._full_model, modules, self.selection_text)[0]

    def _quantize_to(self, format_names: Sequence[str]) -> Candidates:
        """Return the candidates without scores: all layers and embeddings quantized to each of the
        named formats that fits them.

        Layers are rounded by the format's method, embeddings always to nearest. What is quantized
        is kept for later calls.
        """
        schemes = {
            name: self.engine.schemes[name]
            for name in format_names if name not in self._quantized_layers
        }  # fmt: skip
        formats = quantize_layers(
            self.model, self.layers, schemes, self.rounding_text, only_fitting=True,
            on_progress=self.on_rounding,
        )  # fmt: skip
        for format_name, scheme in schemes.items():
            to_nearest = replace(scheme, method=None)
            for name, table in self.embeddings.items():
                if scheme_fits(table.linear, scheme):
                    formats[format_name][name] = quantize_layer(table.linear, to_nearest)
        self._quantized_layers.update(formats)
        quantized = {name: self._quantized_layers[name] for name in format_names}
        return replace(self.unscored, formats=quantized)

    def _build_uniform(self, format_names: Sequence[str]) -> dict[str, nn.Module]:
        """Return, by format, a copy of the model with that format in all layers and embeddings that
        it fits.
        """
        candidates = self._quantize_to(format_names)
        return {
            format_name: self._build_model(candidates, dict.fromkeys(layers, format_name))
            for format_name, layers in candidates.formats.items()
        }

    def _build_model(self, candidates: Candidates, formats: Mapping[str, str]) -> nn.Module:
        """Return a copy of the model in which each layer has its format in `formats`, which gives
        the format's name by the layer's name.

        Its layers share their codes with the candidates. A scale can be replaced in the copy alone.
        """
        replacements: dict[int, nn.Module] = {}  # by the id() of the module to replace
        for name, format_name in formats.items():
            if format_name == self.engine.full_precision:
                continue
            quantized = candidates.formats[format_name][name]
            if name in self.embeddings:
                replacements |= self.embeddings[name].replacements(quantized)
            else:
                replacements[id(self.layers[name])] = copy_with_own_scales(quantized)
        return with_modules(self.model, replacements)

    def _compare_with_uniform(self, candidates: Candidates, allocation: Allocation) -> Allocation:
        """Return the given allocation or a uniform one, with one format for all layers: the one
        whose model has the smaller KL from the full-precision model, measured on the selection
        text.

        The uniform format is the one of least predicted cost among those within the budget of bits
        or bytes. If there is none, the given allocation is returned.
        """
        within_budget = {
            name: choice for name, choice in candidates.uniform_choices.items()
            if choice.bytes <= self.layer_budget
        }  # fmt: skip
        if not within_budget:
            return allocation
        cheapest = min(within_budget, key=lambda name: within_budget[name].cost)
        uniform = candidates.uniform_allocation(cheapest, allocation.bound)
        if uniform.choice_indices == allocation.choice_indices:  # the same: nothing to measure
            return allocation
        models = [
            self._build_model(candidates, candidates.formats_by_layer(compared))
            for compared in (allocation, uniform)
        ]
        kl = kl_per_sequence(self._full_model, models, self.selection_text)
        mixed_kl, uniform_kl = map(sum, kl)
        return uniform if uniform_kl < mixed_kl else allocation

    @property
    def _full_model(self) -> nn.Module:
        """The model in full precision as it was given: before any rotation, and before weights were
        rounded after it.
        """
        return self.model if self.unrotated is None else self.unrotated.model

    def _mean_loss(self, module: nn.Module) -> float:
        """Return a model's mean loss on the selection text, in nats per token."""
        return float(loss_and_kl_per_sequence(module, self.selection_text)[0].mean())

    def _search_within_loss(self, candidates: Candidates, frontier: Frontier) -> Allocation:
        """Return the smallest allocation tried whose measured loss increase is within the budget.

        Predicted costs are only estimates. So each of `_ROUNDS` rounds takes the smallest
        allocation whose predicted cost is within a limit, at first the budget, and measures the
        loss increase. The next limit is this allocation's predicted cost times allowed / measured
        increase, a ratio that is clipped to 1/4 to 4.

        Raises:
            WakefulError: no allocation that was tried is within the budget.
        """
        full_loss, allowed = self._mean_loss(self._full_model), self.budget.loss
        max_predicted_cost, best = allowed, None
        for _ in range(_ROUNDS):
            allocation = frontier.within_cost(max_predicted_cost)
            module = self._build_model(candidates, candidates.formats_by_layer(allocation))
            increase = self._mean_loss(module) - full_loss
            if increase <= allowed and (best is None or allocation.bytes < best.bytes):
                best = allocation
            ratio = allowed / max(increase, 1e-6)  # the loss may fall by chance
            max_predicted_cost = allocation.cost * min(4.0, max(0.25, ratio))
        if best is None:
            raise WakefulError(
                f"loss = {allowed:g}: all formats that were tried raise the loss of calibration "
                "text by more; allow more, or name more --calibration_sequences"
            )
        return best


def split_text(text: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Split calibration sequences into (those by which layers are rounded, those by which formats
    are selected).

    Every fourth sequence is for selection; if there are fewer than four, the last one is.
    """
    selection = [*text[3::4]] or [text[-1]]
    # By identity, as `==` of tensors compares their elements.
    rounding = [tokens for tokens in text if not any(tokens is other for other in selection)]
    return rounding, selection
