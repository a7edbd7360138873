"""The smallest file: a format for each group of layers within bits, bytes or a loss.

Layers are rounded in every format that the engine runs; one backward pass scores them; a knapsack
chooses; and what it chose is compared with uniform formats on text that neither rounded nor scored.
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
from wakeful.quantization.allocation import Allocation, FormatChoice, Frontier
from wakeful.quantization.arithmetic import Arithmetic
from wakeful.quantization.convert import exchanged, scheme_of
from wakeful.quantization.formats import Formats, fits, format_bytes, quantize_layers
from wakeful.quantization.gguf_file import Table
from wakeful.quantization.groups import fused_groups
from wakeful.quantization.linear import QuantizedLinear, matrix, quantized
from wakeful.quantization.measure import divergences, losses_and_divergences
from wakeful.quantization.schemes import Scheme
from wakeful.quantization.scores import Scores, score_formats
from wakeful.quantization.targets import VLLM, Target
from wakeful.quantization.tuning import Tuning, is_tunable, tune_scales, with_own_scale
from wakeful.terminal.display import OnProgress, ignore_progress

MIXED = "mixed"
"""The name of the model whose layers' formats are chosen."""
_ROUNDS = 5
"""Allocations that are tried to meet a loss."""
_TOKENS = 2048
"""About so many tokens are scored at a time."""


@dataclass(frozen=True)
class Budget:
    """Limit of the file; one of the fields is not 0."""

    bits: float = 0.0
    """Bits per weight of the layers, scales included; embeddings and the head apart."""
    bytes: int = 0
    """Of the whole file."""
    loss: float = 0.0
    """Nats per token."""


@dataclass(frozen=True)
class Smallest:
    """A chosen format for each layer, and what it is compared with."""

    plain: nn.Module
    """The model in full precision."""
    module: nn.Module
    tables: Mapping[str, QuantizedLinear]
    """The embeddings among the layers that are quantized."""
    target: Target
    formats: Mapping[str, str]
    """The name of each layer's format."""
    uniform: Mapping[str, nn.Module]
    """The model with all layers in one format, by its name: the smallest of no fewer bytes, and
    smaller ones.
    """
    uniform_bytes: Mapping[str, int]
    """Bytes of the layers in each of these."""
    allocation: Allocation
    curve: Sequence[tuple[int, float]]
    """Bytes of the layers and predicted cost along the frontier."""
    weights: int
    """Of the layers."""
    other_bytes: int
    """Bytes of what is not quantized: norms, and mostly embeddings and the head."""
    tuning: Tuning | None = None
    """Result of training the scales, where requested."""

    @property
    def bits(self) -> float:
        """Bits per weight of the layers, scales included."""
        return 8 * self.allocation.bytes / self.weights

    @property
    def modules(self) -> dict[str, nn.Module]:
        """The model of chosen formats and the uniform ones."""
        return {MIXED: self.module, **self.uniform}

    @property
    def bytes(self) -> dict[str, int]:
        """Bytes of the file of each."""
        sizes = {MIXED: self.allocation.bytes, **self.uniform_bytes}
        return {name: size + self.other_bytes for name, size in sizes.items()}

    @property
    def schemes(self) -> dict[str, Scheme]:
        """The scheme of each, or of most of its layers."""
        commonest = scheme_of(self.module)
        assert commonest is not None
        return {MIXED: commonest} | {name: self.target.schemes[name] for name in self.uniform}

    @property
    def counts(self) -> dict[str, int]:
        """Number of layers in each format."""
        counts = Counter(self.formats.values())
        names = (*self.target.schemes, self.target.full)
        return {name: counts[name] for name in names if counts[name]}


@dataclass(frozen=True)
class Candidates:
    """Layers of a model in every format that they fit, with the bytes and the cost of each."""

    layers: Mapping[str, nn.Module]
    target: Target
    weight_bytes: int
    """Bytes of a weight that is not quantized, as it is stored."""
    formats: Formats = field(default_factory=dict)
    scores: Scores = field(default_factory=dict)
    """Empty before layers are scored: then all cost nothing."""

    @cached_property
    def groups(self) -> list[tuple[str, ...]]:
        """Layers of one format each."""
        return fused_groups(self.layers) if self.target.fuses else [(name,) for name in self.layers]

    @cached_property
    def names(self) -> list[list[str]]:
        """Formats that each group may take."""
        schemes, full = self.target.schemes, self.target.full
        return [
            [
                *(name for name, scheme in schemes.items()
                  if all(fits(self.layers[layer], scheme) for layer in group)),
                full,
            ]
            for group in self.groups
        ]  # fmt: skip

    @cached_property
    def choices(self) -> list[list[FormatChoice]]:
        """Bytes and costs of each group in these formats."""
        return [
            [self.choice(name, group) for name in names]
            for names, group in zip(self.names, self.groups, strict=True)
        ]

    @cached_property
    def uniform(self) -> dict[str, FormatChoice]:
        """Bytes and cost of all layers in each format that all fit, the smallest first."""
        common = set[str].intersection(*map(set, self.names)) - {self.target.full}
        points = {name: self.choice(name, self.layers) for name in common}
        return dict(sorted(points.items(), key=lambda point: point[1].bytes))

    @property
    def weights(self) -> int:
        """Number of the layers' weights."""
        return sum(matrix(layer)[0].numel() for layer in self.layers.values())

    def choice(self, name: str, layers: Iterable[str]) -> FormatChoice:
        """Return bytes and cost of some layers in a format."""
        layers, shapes = list(layers), [matrix(self.layers[layer])[0].shape for layer in layers]
        if name == self.target.full:
            return FormatChoice(self.weight_bytes * sum(math.prod(shape) for shape in shapes), 0.0)
        size = sum(format_bytes(self.target.schemes[name], *shape) for shape in shapes)
        scores = self.scores.get(name, {})
        return FormatChoice(size, sum(scores.get(layer, 0.0) for layer in layers))

    def by_layer(self, allocation: Allocation) -> dict[str, str]:
        """Return the name of each layer's format."""
        chosen = zip(self.groups, self.names, allocation.chosen, strict=True)
        return {layer: names[number] for group, names, number in chosen for layer in group}

    def allocation(self, name: str, bound: float) -> Allocation:
        """Return the allocation of one format to all layers."""
        chosen = tuple(names.index(name) for names in self.names)
        return Allocation(chosen, self.uniform[name].bytes, self.uniform[name].cost, bound)


@dataclass(frozen=True, eq=False)
class SmallestSearch:
    """The search for one model; `find` runs it."""

    model: nn.Module
    layers: Mapping[str, nn.Module]
    budget: Budget
    rounding_text: Sequence[Int[Tensor, "1 L"]]
    choosing_text: Sequence[Int[Tensor, "1 L"]]
    all_bytes: int
    """Bytes of the model in full precision, as it is stored."""
    stored: torch.dtype
    target: Target = VLLM
    tables: Mapping[str, Table] = field(default_factory=dict)
    """Embeddings that are quantized too."""
    arithmetic: Arithmetic = "integer"
    tune: int = 0
    """Steps of training the scales."""
    tuning_text: Sequence[Int[Tensor, "1 L"]] = ()
    tuning_state: Path | None = None
    """File of the state of training."""
    on_rounding: OnProgress = ignore_progress
    on_tuning: OnProgress = ignore_progress

    @cached_property
    def sizes(self) -> Candidates:
        """The layers with the bytes of each in every format, and no cost yet."""
        tables = {name: table.linear for name, table in self.tables.items()}
        return Candidates({**self.layers, **tables}, self.target, self.stored.itemsize)

    @property
    def other_bytes(self) -> int:
        """Bytes of what is not quantized."""
        return self.all_bytes - self.sizes.weights * self.stored.itemsize

    @property
    def room(self) -> int:
        """Bytes that the layers may take, where the budget says so."""
        if self.budget.bits:
            return math.floor(self.budget.bits * self.sizes.weights / 8)
        return self.budget.bytes - self.other_bytes

    @property
    def compared(self) -> list[str]:
        """The uniform formats to measure beside a choice that takes all of the room."""
        return references(self.sizes.uniform, math.inf if self.budget.loss else self.room)

    def check(self) -> None:
        """Raise `WakefulError` where nothing, or everything in full precision, is in the budget."""
        if self.tune and not any(map(is_tunable, self.target.schemes.values())):
            raise WakefulError("tune: none of these formats has scales of whole numbers to train")
        if self.budget.loss:
            return
        frontier, weights = Frontier(self.sizes.choices), self.sizes.weights
        smallest = f"{8 * frontier.least / weights:.2f} bits per weight"
        if self.room < frontier.least:
            if self.budget.bits:
                raise WakefulError(
                    f"bits = {self.budget.bits:g} are too few: in their smallest formats the "
                    f"layers take {smallest}"
                )
            raise WakefulError(
                f"bytes = {self.budget.bytes:,} are too few: the layers take {frontier.least:,} in "
                f"their smallest formats ({smallest}), all else {self.other_bytes:,}"
            )
        if self.room >= self.sizes.choice(self.target.full, self.sizes.layers).bytes:
            raise WakefulError(
                "the model fits as it is, so that nothing is quantized: ask for fewer bits or bytes"
            )

    def find(self) -> Smallest:
        """Return the best formats within the budget.

        Raises:
            WakefulError: the budget is below the smallest formats, or no format fits.
        """
        self.check()
        candidates = self._candidates()
        frontier = Frontier(candidates.choices)
        if self.budget.loss:
            allocation = self._within_loss(candidates, frontier)
        else:
            chosen = frontier.within_bytes(self.room)
            allocation = self._at_least_uniform(candidates, chosen, self.room)
        formats = candidates.by_layer(allocation)
        if set(formats.values()) == {self.target.full}:
            raise WakefulError(
                "no format keeps the loss within it, so that nothing is quantized: allow more loss"
            )
        module, tuning = self._module(candidates, formats), None
        if self.tune:
            tuning = tune_scales(
                self.model, module, self.tuning_text or self.rounding_text, self.choosing_text,
                steps=self.tune, state=self.tuning_state, on_progress=self.on_tuning,
            )  # fmt: skip
        uniform = references(candidates.uniform, allocation.bytes)
        return Smallest(
            plain=self.model, module=module, target=self.target, tuning=tuning, formats=formats,
            allocation=allocation,
            tables={name: candidates.formats[formats[name]][name] for name in self.tables
                    if formats[name] != self.target.full},
            uniform={name: self._module(candidates, dict.fromkeys(candidates.layers, name))
                     for name in uniform},
            uniform_bytes={name: candidates.uniform[name].bytes for name in uniform},
            curve=frontier.curve(), weights=candidates.weights, other_bytes=self.other_bytes,
        )  # fmt: skip

    def _candidates(self) -> Candidates:
        schemes = {
            name: scheme for name, scheme in self.target.schemes.items()
            if any(name in names for names in self.sizes.names)
        }  # fmt: skip
        formats = quantize_layers(
            self.model, self.layers, schemes, self.rounding_text, whole_groups=True,
            arithmetic=self.arithmetic, on_progress=self.on_rounding,
        )  # fmt: skip
        for name, scheme in schemes.items():
            nearest = replace(scheme, method=None)
            formats[name] |= {
                label: quantized(table.linear, nearest, self.arithmetic)
                for label, table in self.tables.items() if fits(table.linear, scheme)
            }  # fmt: skip
        size = max(1, _TOKENS // self.choosing_text[0].shape[1])
        batches = torch.cat(list(self.choosing_text)).split(size)
        scores = score_formats(self.model, self.layers, formats, batches, tables=self.tables)
        return replace(self.sizes, formats=formats, scores=scores)

    def _module(self, candidates: Candidates, formats: Mapping[str, str]) -> nn.Module:
        """Return the model with a format for each layer, whose scales may be exchanged."""
        replaced: dict[int, nn.Module] = {}
        for layer, name in formats.items():
            if name == self.target.full:
                continue
            form = candidates.formats[name][layer]
            if layer in self.tables:
                replaced |= self.tables[layer].replaced(form)
            else:
                replaced[id(self.layers[layer])] = with_own_scale(form)
        return exchanged(self.model, replaced)

    def _at_least_uniform(
        self, candidates: Candidates, allocation: Allocation, room: int
    ) -> Allocation:
        """Return the allocation, or the best uniform one in no more bytes where the text that
        scored finds that closer to the model.
        """
        fitting = {name: point for name, point in candidates.uniform.items() if point.bytes <= room}
        if not fitting:
            return allocation
        name = min(fitting, key=lambda name: fitting[name].cost)
        uniform = candidates.allocation(name, allocation.bound)
        if uniform.chosen == allocation.chosen:
            return allocation
        modules = [
            self._module(candidates, candidates.by_layer(candidate))
            for candidate in (allocation, uniform)
        ]
        chosen_kl, uniform_kl = map(sum, divergences(self.model, modules, self.choosing_text))
        return uniform if uniform_kl < chosen_kl else allocation

    def _loss(self, module: nn.Module) -> float:
        """Return the mean loss of the text that chooses, in nats per token."""
        return float(losses_and_divergences(module, self.choosing_text)[0].mean())

    def _within_loss(self, candidates: Candidates, frontier: Frontier) -> Allocation:
        """Return the smallest allocation whose measured loss increase is within the budget.

        Each round measures an allocation and rescales the predicted cost that the next may have by
        allowed / measured increase.
        """
        full_loss, allowed = self._loss(self.model), self.budget.loss
        predicted_cost, best = allowed, None
        for _ in range(_ROUNDS):
            allocation = frontier.within_cost(predicted_cost)
            module = self._module(candidates, candidates.by_layer(allocation))
            increase = self._loss(module) - full_loss
            if increase <= allowed and (best is None or allocation.bytes < best.bytes):
                best = allocation
            rescaling = min(4.0, max(0.25, allowed / max(increase, 1e-6)))
            predicted_cost = allocation.cost * rescaling
        if best is None:
            raise WakefulError(
                f"loss = {allowed:g}: no formats tried keep the loss within it on the text that "
                "chooses; allow more, or name more --calibration_sequences"
            )
        return best


def references(uniform: Mapping[str, FormatChoice], size: float) -> list[str]:
    """Return the uniform formats to measure beside a choice of so many bytes, given the smallest
    first: the first of no fewer bytes, and all smaller ones.
    """
    names = list(uniform)
    smaller = sum(point.bytes < size for point in uniform.values())
    return names[: smaller + 1]


def split_text(text: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sequences that layers are rounded on, and every fourth, which chooses formats; of
    fewer the last one chooses.
    """
    choosing = [*text[3::4]] or [text[-1]]
    rounding = [tokens for tokens in text if not any(tokens is choice for choice in choosing)]
    return rounding, choosing
