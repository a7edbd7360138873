"""The smallest file: a format for each group of layers within bits, bytes or a loss.

Layers are rounded in every format that the engine runs; one backward pass scores them; a knapsack
chooses; and what it chose is compared with uniform formats on text that neither rounded nor scored.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from jaxtyping import Int
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.quantization.allocation import Allocation, FormatChoice, Frontier
from wakeful.quantization.arithmetic import Arithmetic
from wakeful.quantization.convert import exchanged, scheme_of
from wakeful.quantization.formats import VLLM, Formats, fits, quantize_formats
from wakeful.quantization.groups import fused_groups
from wakeful.quantization.linear import QuantizedLinear, matrix
from wakeful.quantization.measure import divergences, losses_and_divergences
from wakeful.quantization.schemes import Scheme
from wakeful.quantization.scores import Scores, score_formats
from wakeful.quantization.tuning import Tuning, tune_scales, with_own_scale
from wakeful.terminal.display import OnProgress, ignore_progress

MIXED = "mixed"
"""The name of the model whose layers' formats are chosen."""
FULL = "full precision"
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

    module: nn.Module
    formats: Mapping[str, str]
    """The name of each layer's format."""
    uniform: Mapping[str, nn.Module]
    """The model with all layers in one format, by its name: the smallest of no fewer bytes, and
    smaller ones.
    """
    allocation: Allocation
    curve: Sequence[tuple[int, float]]
    """Bytes of the layers and predicted cost along the frontier."""
    weights: int
    """Of the layers."""
    other_bytes: int
    """Bytes of embeddings, norms and an unquantized head."""
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
    def schemes(self) -> dict[str, Scheme]:
        """The scheme of each, or of most of its layers."""
        commonest = scheme_of(self.module)
        assert commonest is not None
        return {MIXED: commonest} | {name: VLLM[name] for name in self.uniform}

    @property
    def counts(self) -> dict[str, int]:
        """Number of layers in each format."""
        counts = Counter(self.formats.values())
        return {name: counts[name] for name in (*VLLM, FULL) if counts[name]}


@dataclass(frozen=True)
class Candidates:
    """Layers of a model in every format that they fit, with what each costs."""

    layers: Mapping[str, nn.Module]
    formats: Formats
    scores: Scores
    weight_bytes: int
    """Bytes of a weight in full precision, as it is stored."""

    @cached_property
    def groups(self) -> list[tuple[str, ...]]:
        """Layers of one format each."""
        return fused_groups(self.layers)

    @cached_property
    def names(self) -> list[list[str]]:
        """Formats that each group may take."""
        return [
            [*(name for name, forms in self.formats.items() if forms.keys() >= set(group)), FULL]
            for group in self.groups
        ]

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
        points = {
            name: self.choice(name, self.layers)
            for name, forms in self.formats.items()
            if forms.keys() == self.layers.keys()
        }
        return dict(sorted(points.items(), key=lambda point: point[1].bytes))

    def choice(self, name: str, layers: Iterable[str]) -> FormatChoice:
        """Return bytes and cost of some layers in a format."""
        if name == FULL:
            return FormatChoice(sum(map(self.full_bytes, layers)), 0.0)
        forms, scores = self.formats[name], self.scores[name]
        layers = list(layers)
        return FormatChoice(
            sum(format_bytes(forms[layer]) for layer in layers),
            sum(scores[layer] for layer in layers),
        )

    def full_bytes(self, layer: str) -> int:
        """Return a layer's bytes in full precision."""
        return matrix(self.layers[layer])[0].numel() * self.weight_bytes

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
    arithmetic: Arithmetic = "integer"
    tune: int = 0
    """Steps of training the scales."""
    tuning_text: Sequence[Int[Tensor, "1 L"]] = ()
    tuning_state: Path | None = None
    """File of the state of training."""
    on_rounding: OnProgress = ignore_progress
    on_tuning: OnProgress = ignore_progress

    def find(self) -> Smallest:
        """Return the best formats within the budget.

        Raises:
            WakefulError: the budget is below the smallest formats, or no format fits.
        """
        candidates = self._candidates()
        frontier = Frontier(candidates.choices)
        weights = sum(matrix(layer)[0].numel() for layer in self.layers.values())
        other_bytes = self.all_bytes - sum(map(candidates.full_bytes, self.layers))
        if self.budget.loss:
            allocation = self._within_loss(candidates, frontier)
        else:
            room = self.budget.bytes - other_bytes
            if self.budget.bits:
                room = math.floor(self.budget.bits * weights / 8)
            allocation = self._at_least_uniform(candidates, frontier.within_bytes(room), room)
        formats = candidates.by_layer(allocation)
        if set(formats.values()) == {FULL}:
            raise WakefulError(
                "the model fits as it is, so that nothing is quantized: ask for fewer bits or "
                "bytes, or more loss"
            )
        module, tuning = self._module(candidates, formats), None
        if self.tune:
            tuning = tune_scales(
                self.model, module, self.tuning_text or self.rounding_text, self.choosing_text,
                steps=self.tune, state=self.tuning_state, on_progress=self.on_tuning,
            )  # fmt: skip
        return Smallest(
            module=module, tuning=tuning, formats=formats, allocation=allocation,
            uniform={name: self._module(candidates, dict.fromkeys(self.layers, name))
                     for name in references(candidates.uniform, allocation.bytes)},
            curve=frontier.curve(), weights=weights, other_bytes=other_bytes,
        )  # fmt: skip

    def _candidates(self) -> Candidates:
        schemes = {
            name: scheme
            for name, scheme in VLLM.items()
            if any(fits(layer, scheme) for layer in self.layers.values())
        }
        formats = quantize_formats(
            self.model, self.layers, schemes, self.rounding_text,
            arithmetic=self.arithmetic, on_progress=self.on_rounding,
        )  # fmt: skip
        size = max(1, _TOKENS // self.choosing_text[0].shape[1])
        batches = torch.cat(list(self.choosing_text)).split(size)
        scores = score_formats(self.model, self.layers, formats, batches)
        return Candidates(self.layers, formats, scores, self.stored.itemsize)

    def _module(self, candidates: Candidates, formats: Mapping[str, str]) -> nn.Module:
        """Return the model with a format for each layer, whose scales may be exchanged."""
        return exchanged(self.model, {
            id(self.layers[layer]): with_own_scale(candidates.formats[name][layer])
            for layer, name in formats.items() if name != FULL
        })  # fmt: skip

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

        Scores are scaled by what allocations in turn are measured to cost.
        """
        full_loss, allowed = self._loss(self.model), self.budget.loss
        cost, best = allowed, None
        for _ in range(_ROUNDS):
            allocation = frontier.within_cost(cost)
            module = self._module(candidates, candidates.by_layer(allocation))
            increase = self._loss(module) - full_loss
            if increase <= allowed and (best is None or allocation.bytes < best.bytes):
                best = allocation
            cost = allocation.cost * min(4.0, max(0.25, allowed / max(increase, 1e-6)))
        if best is None:
            raise WakefulError(
                f"loss = {allowed:g}: no formats tried keep the loss within it on the text that "
                "chooses; allow more, or name more --calibration_sequences"
            )
        return best


def references(uniform: Mapping[str, FormatChoice], size: int) -> list[str]:
    """Return the uniform formats to measure beside a choice of so many bytes, given the smallest
    first: the first of no fewer bytes, and all smaller ones.
    """
    names = list(uniform)
    smaller = sum(point.bytes < size for point in uniform.values())
    return names[: smaller + 1]


def split_text(text: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the sequences that layers are rounded on, and every fourth, which chooses formats.

    Raises:
        WakefulError: there are fewer than two.
    """
    if len(text) < 2:
        raise WakefulError(
            "calibration_sequences = 1: one sequence rounds and another one chooses formats; give "
            "2 or more"
        )
    choosing = [*text[3::4]] or [text[-1]]
    rounding = [tokens for tokens in text if not any(tokens is choice for choice in choosing)]
    return rounding, choosing


def format_bytes(layer: QuantizedLinear) -> int:
    """Return the bytes of a layer's numbers and scales."""
    return sum(buffer.nbytes for name, buffer in layer.named_buffers() if name != "bias")
