"""The smallest file: a format for each group of layers within bits, bytes or a loss.

Layers are rounded in every format that the engine runs; one backward pass scores them; a knapsack
chooses; and what it chose is compared with uniform formats on text that neither rounded nor scored.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Int
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.quantization.allocation import Allocation, Choice, Frontier
from wakeful.quantization.arithmetic import Arithmetic
from wakeful.quantization.convert import exchanged
from wakeful.quantization.formats import VLLM, Formats, fits, quantize_formats
from wakeful.quantization.groups import fused_groups
from wakeful.quantization.linear import QuantizedLinear, matrix
from wakeful.quantization.measure import divergences, nll, predicted
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
    """The model with all layers in one format, by its name."""
    allocation: Allocation
    curve: Sequence[tuple[int, float]]
    """Bytes of the layers and predicted cost along the frontier."""
    points: Mapping[str, tuple[int, float]]
    """The same of uniform formats."""
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
    def counts(self) -> dict[str, int]:
        """Number of layers in each format."""
        found = Counter(self.formats.values())
        return {name: found[name] for name in (*VLLM, FULL) if found[name]}


@dataclass(eq=False)
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
    on_progress: OnProgress = ignore_progress
    candidates: dict[str, Scheme] = field(default_factory=dict)
    formats: Formats = field(default_factory=dict)
    groups: list[tuple[str, ...]] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)
    """The formats that each group may take."""

    def find(self) -> Smallest:
        """Return the best formats within the budget.

        Raises:
            WakefulError: the budget is below the smallest formats, or no format fits.
        """
        self.candidates = {
            name: scheme
            for name, scheme in VLLM.items()
            if any(fits(layer, scheme) for layer in self.layers.values())
        }
        self.formats = quantize_formats(
            self.model, self.layers, list(self.candidates.values()), self.rounding_text,
            arithmetic=self.arithmetic, on_progress=self.on_progress,
        )  # fmt: skip
        batches = torch.cat(list(self.choosing_text)).split(
            max(1, _TOKENS // self.choosing_text[0].shape[1])
        )
        scores = score_formats(self.model, self.layers, self.formats, batches)
        self.groups = fused_groups(self.layers)
        frontier = Frontier([self._choices(group, scores) for group in self.groups])
        full = sum(self._full_bytes(name) for name in self.layers)
        weights = sum(matrix(layer)[0].numel() for layer in self.layers.values())
        other = self.all_bytes - full
        uniform = self._uniform()
        points = {
            name: (
                sum(map(format_bytes, self.formats[self.candidates[name]].values())),
                sum(scores[self.candidates[name]].values()),
            )
            for name in uniform
        }
        if self.budget.loss:
            allocation = self._within_loss(frontier)
        else:
            room = self.budget.bytes - other
            if self.budget.bits:
                room = math.floor(self.budget.bits * weights / 8)
            allocation = frontier.within_bytes(room)
            allocation = self._at_least_uniform(allocation, uniform, points, room)
        if not any(name != FULL for name in self._by_layer(allocation).values()):
            raise WakefulError(
                "the model fits as it is, so that nothing is quantized: ask for fewer bits or "
                "bytes, or more loss"
            )
        module, tuning = self._module(allocation), None
        if self.tune:
            tuning = tune_scales(
                self.model, module, self.rounding_text, self.choosing_text, steps=self.tune,
                on_progress=self.on_progress,
            )  # fmt: skip
        return Smallest(
            module=module, tuning=tuning, formats=self._by_layer(allocation),
            uniform=uniform, allocation=allocation, curve=frontier.curve(), points=points,
            weights=weights, other_bytes=other,
        )  # fmt: skip

    def _choices(self, group: Sequence[str], scores: Scores) -> list[Choice]:
        names = [
            name
            for name, scheme in self.candidates.items()
            if all(layer in self.formats[scheme] for layer in group)
        ]
        self.names.append([*names, FULL])
        choices = [
            Choice(
                sum(format_bytes(self.formats[scheme][layer]) for layer in group),
                sum(scores[scheme][layer] for layer in group),
            )
            for scheme in (self.candidates[name] for name in names)
        ]
        return [*choices, Choice(sum(map(self._full_bytes, group)), 0.0)]

    def _full_bytes(self, name: str) -> int:
        return matrix(self.layers[name])[0].numel() * self.stored.itemsize

    def _by_layer(self, allocation: Allocation) -> dict[str, str]:
        return {
            layer: self.names[number][chosen]
            for number, (group, chosen) in enumerate(
                zip(self.groups, allocation.chosen, strict=True)
            )
            for layer in group
        }

    def _module(self, allocation: Allocation) -> nn.Module:
        chosen = self._by_layer(allocation)
        return self._with({
            layer: with_own_scale(self.formats[self.candidates[name]][layer])
            for layer, name in chosen.items() if name != FULL
        })  # fmt: skip

    def _with(self, forms: Mapping[str, QuantizedLinear]) -> nn.Module:
        return exchanged(self.model, {id(self.layers[name]): form for name, form in forms.items()})

    def _uniform(self) -> dict[str, nn.Module]:
        """Return the model in each format that all of its layers fit."""
        return {
            name: self._with(self.formats[scheme])
            for name, scheme in self.candidates.items()
            if self.formats[scheme].keys() == self.layers.keys()
        }

    def _at_least_uniform(
        self, allocation: Allocation, uniform: Mapping[str, nn.Module],
        points: Mapping[str, tuple[int, float]], room: int,
    ) -> Allocation:  # fmt: skip
        """Return the allocation, or the best uniform one in no more bytes where the text that
        scored finds that closer to the model.
        """
        names = [name for name in uniform if points[name][0] <= room]
        modules = [self._module(allocation), *(uniform[name] for name in names)]
        kl = [sum(values) for values in divergences(self.model, modules, self.choosing_text)]
        best = kl.index(min(kl))
        if best == 0:
            return allocation
        name = names[best - 1]
        chosen = tuple(own.index(name) for own in self.names)
        return Allocation(chosen, *points[name], allocation.bound)

    @torch.inference_mode()
    def _loss(self, module: nn.Module) -> float:
        """Return the mean loss of the text that chooses."""
        total, count = 0.0, 0
        for tokens in self.choosing_text:
            logits, targets = predicted(module, tokens)
            total, count = total + nll(logits, targets), count + len(targets)
        return total / count

    def _within_loss(self, frontier: Frontier) -> Allocation:
        """Return the smallest allocation whose measured loss increase is within the budget.

        Scores are scaled by what allocations in turn are measured to cost.
        """
        before, wanted = self._loss(self.model), self.budget.loss
        cost, best = wanted, None
        for _ in range(_ROUNDS):
            allocation = frontier.within_cost(cost)
            measured = self._loss(self._module(allocation)) - before
            if measured <= wanted and (best is None or allocation.bytes < best.bytes):
                best = allocation
            cost = allocation.cost * min(4.0, max(0.25, wanted / max(measured, 1e-6)))
        if best is None:
            raise WakefulError(
                f"loss = {wanted:g}: no formats tried keep the loss within it on the text that "
                "chooses; allow more, or name more --calibration_sequences"
            )
        return best


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
    return [one for one in text if not any(one is other for other in choosing)], choosing


def format_bytes(layer: QuantizedLinear) -> int:
    """Return the bytes of a layer's numbers and scales."""
    return sum(buffer.nbytes for name, buffer in layer.named_buffers() if name != "bias")
