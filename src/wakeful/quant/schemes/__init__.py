"""Schemes: which grid of whole numbers each tensor of a linear layer is laid on.

A grid says how real numbers become whole ones and who shares a scale:
x̂ = (q − z)·s with a scale s, a zero point z (0 where there is none) and q a whole number between
`low` and `high` (From Attention to Activation, section 5.2). All arithmetic is in float32.

Shapes: M tokens (or output channels, of weights), K input channels.
"""

import copy
import re
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, final, get_args

import torch
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.variants import Variant, build, variant_name

Per = Literal["channel", "token", "tensor"]
ScaleKind = Literal["dynamic", "static"]
_ALLOWED: dict[str, tuple[Per, ...]] = {
    "weights": ("channel", "tensor"),
    "inputs": ("token", "tensor"),
    "outputs": ("token", "tensor"),
}
_SMALLEST = torch.finfo(torch.float32).tiny
_FIRST = re.compile(r"(weights|inputs|outputs)\s*=")
_FIRST_GRID = re.compile(r"([a-z]+)(\d)/([a-z]+)")
_AS_NOW = r"\1(bits=\2, per='\3')"
"""Grids as earlier versions wrote them, weights=absmax6/channel,inputs=…, and as a call."""


@dataclass(frozen=True)
class Scales:
    """The step of a grid and the whole number that means zero; both broadcast against x."""

    scale: Tensor
    zero: Tensor | None = None
    """int32, or None for a grid that is symmetric about zero."""


@dataclass(kw_only=True, eq=False)
class Grid(Variant, ABC):
    """The whole numbers from `low` to `high`, how a range is laid on them, and who shares a scale.

    `per` is an output channel of weights, a token of activations, or the whole tensor.
    """

    symmetric: ClassVar[bool] = True
    """Whether zero means zero, so that there is no zero point."""
    bits: int
    per: Per

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise WakefulError(f"a grid has 2 to 8 bits, got {self.bits}")

    @property
    @abstractmethod
    def low(self) -> int:
        """The smallest whole number."""

    @property
    def high(self) -> int:
        """The largest whole number."""
        return 2 ** (self.bits - 1) - 1

    @abstractmethod
    def fit(self, smallest: Tensor, largest: Tensor) -> Scales:
        """Return the scales for values between `smallest` and `largest` (tensors of one shape).

        A range that is one point is represented exactly.
        """

    @final
    def scales_of(self, x: Tensor, sequences: int = 1) -> Scales:
        """Return the scales of x (M, K): (M, 1) for a scale a row, (1, 1) for one per tensor.

        Of several equally long `sequences` each has its own per tensor, repeated for its rows.
        """
        x = x.float()
        if self.per != "tensor":
            return self.fit(*x.aminmax(dim=1, keepdim=True))
        if sequences == 1 or not x.numel():
            smallest, largest = x.aminmax()
            return self.fit(smallest.reshape(1, 1), largest.reshape(1, 1))
        smallest, largest = x.reshape(sequences, -1).aminmax(dim=1, keepdim=True)
        rows = x.shape[0] // sequences
        return self.fit(smallest.repeat_interleave(rows, 0), largest.repeat_interleave(rows, 0))

    @final
    def levels(self, x: Tensor, scales: Scales) -> Tensor:
        """Return q = clip(round(x / s) + z, low, high) as float32; halves round to even."""
        q = torch.round(x.float() / scales.scale)
        if scales.zero is not None:
            q = q + scales.zero
        return q.clamp(self.low, self.high)

    @final
    def quantize(self, x: Tensor, scales: Scales) -> Tensor:
        """Return q as int8."""
        return self.levels(x, scales).to(torch.int8)

    @final
    def dequantize(self, q: Tensor, scales: Scales, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return x̂ = (q − z)·s."""
        q = q.to(dtype)
        return (q if scales.zero is None else q - scales.zero) * scales.scale.to(dtype)

    @final
    def fake_quantize(self, x: Tensor, scales: Scales) -> Tensor:
        """Return x̂ of x: float32 numbers that lie on the grid; a NaN stays one."""
        return self.dequantize(self.levels(x, scales), scales)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Grid) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))


class Absmax(Grid):
    """Symmetric about zero: s = max|x| / (2^(b−1) − 1), z = 0; for 8 bits q is −127 to 127."""

    examples = ("absmax(bits=8, per='token')",)

    @property
    def low(self) -> int:
        return -self.high

    def fit(self, smallest: Tensor, largest: Tensor) -> Scales:
        return Scales(_step(torch.maximum(smallest.abs(), largest.abs()).float(), self.high))


class Zeropoint(Grid):
    """From the smallest to the largest: s = (max − min) / (2^b − 1), z = low − round(min / s)."""

    examples = ("zeropoint(bits=4, per='channel')",)
    symmetric = False

    @property
    def low(self) -> int:
        return -self.high - 1

    def fit(self, smallest: Tensor, largest: Tensor) -> Scales:
        smallest, largest = smallest.float(), largest.float()
        # A constant c has no range to divide: with the step |c|, the level next to zero is c.
        span = torch.where(largest == smallest, largest.abs() * (2**self.bits - 1),
                           largest - smallest)  # fmt: skip
        scale = _step(span, 2**self.bits - 1)
        return Scales(scale, (self.low - torch.round(smallest / scale)).to(torch.int32))


def _step(size: Tensor, levels: int) -> Tensor:
    """Return size / levels, or 1 where that is not a normal number: all of it then rounds to 0."""
    step = size / levels
    return torch.where(step < _SMALLEST, torch.ones_like(step), step)


@dataclass(kw_only=True, eq=False)
class Scheme(Variant):
    """What a quantized linear layer does: ŷ of x̂ Ŵᵀ + b; None leaves a tensor as it is.

    Activation scales are `dynamic` (of the tensor at hand) or `static` (of calibration text).
    Two schemes are equal where they state the same; `str` prefers the short name of one.
    """

    weights: Grid
    inputs: Grid | None = None
    outputs: Grid | None = None
    scales: ScaleKind = "dynamic"

    def __post_init__(self) -> None:
        for part, grid in (("weights", self.weights), *self.activations):
            if grid.per not in _ALLOWED[part]:
                raise WakefulError(
                    f"{part} share a scale per {' or '.join(_ALLOWED[part])}, not per {grid.per}"
                )
        for part, grid in self.activations:
            if not grid.symmetric:
                raise WakefulError(f"{part} take a grid without a zero point, not {grid}")
        if self.scales not in get_args(ScaleKind):
            raise WakefulError(f"scales must be dynamic or static, got {self.scales!r}")
        if self.scales == "static" and not self.can_be_static:
            raise WakefulError(
                f"{self.with_scales('dynamic')} has nothing to calibrate: only per-tensor "
                "activation scales can be static, so use it with dynamic ones"
            )

    @property
    def activations(self) -> list[tuple[str, Grid]]:
        """The grids of inputs and outputs, where there are any."""
        grids = (("inputs", self.inputs), ("outputs", self.outputs))
        return [(part, grid) for part, grid in grids if grid is not None]

    @property
    def can_be_static(self) -> bool:
        """Whether it has activation scales and all of them are per tensor."""
        return bool(self.activations) and all(grid.per == "tensor" for _, grid in self.activations)

    @property
    def expression(self) -> str:
        """The expression that `parse_scheme` reads back, as the scheme's class spells it."""
        return Variant.__str__(self)

    @property
    def definition(self) -> str:
        """The expression that spells out each grid, without the kind of scales."""
        return Scheme(weights=self.weights, inputs=self.inputs, outputs=self.outputs).expression

    def with_scales(self, scales: ScaleKind) -> "Scheme":
        """Return the same scheme with `dynamic` or `static` activation scales."""
        made = copy.copy(self)
        made.scales = scales
        made.__post_init__()
        return made

    def __str__(self) -> str:
        dynamic = self.with_scales("dynamic")
        named = (name for name, scheme in SCHEMES.items() if scheme == dynamic)
        name = next(named, dynamic.expression)
        return name if self.scales == "dynamic" else f"{name} {self.scales}"

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Scheme)
            and self.scales == other.scales
            and self.definition == other.definition
        )

    def __hash__(self) -> int:
        return hash((self.definition, self.scales))


_CHANNEL, _TOKEN, _TENSOR = (Absmax(bits=8, per=per) for per in get_args(Per))
_FOUR = Zeropoint(bits=4, per="channel")


class Stated(Scheme):
    """Any grids: `scheme(weights=absmax(bits=6, per="channel"))`."""

    name = "scheme"
    examples = ("scheme(weights=absmax(bits=6, per='tensor'), inputs=absmax(bits=8, per='token'))",)


@dataclass(kw_only=True, eq=False)
class Fine(Scheme):
    """Weights absmax 8-bit per output channel, inputs absmax 8-bit per token."""

    examples = ("fine",)
    weights: Grid = _CHANNEL
    inputs: Grid | None = _TOKEN


@dataclass(kw_only=True, eq=False)
class Moderate(Scheme):
    """Weights and inputs absmax 8-bit per tensor."""

    examples = ("moderate",)
    weights: Grid = _TENSOR
    inputs: Grid | None = _TENSOR


@dataclass(kw_only=True, eq=False)
class Coarse(Moderate):
    """Moderate, and outputs absmax 8-bit per tensor."""

    examples = ("coarse", "coarse(scales='static')")
    outputs: Grid | None = _TENSOR


@dataclass(kw_only=True, eq=False)
class W4(Scheme):
    """Weights zeropoint 4-bit per output channel; activations untouched."""

    examples = ("w4",)
    weights: Grid = _FOUR


SCHEMES: dict[str, Scheme] = {variant_name(kind): kind() for kind in (Fine, Moderate, Coarse, W4)}
"""The schemes of From Attention to Activation, section 5.2, by name."""


def parse_scheme(
    given: str | Scheme, scales: ScaleKind | None = None, *, imports: bool = False
) -> Scheme:
    """Return a scheme, given itself or as an expression, with these scales in place of its own.

    An expression is a name ("fine"), `scheme(weights=absmax(bits=6, per="channel"))`, or
    `my_module:MyScheme(...)`, whose module `imports` lets be imported: only for what the user
    wrote.

    Raises:
        WakefulError: the expression does not parse, or what it says makes no scheme.
    """
    made = given
    if isinstance(given, str):
        text = given.strip()
        if _FIRST.match(text):
            text = f"scheme({_FIRST_GRID.sub(_AS_NOW, text)})"
        made = build("quant.schemes", text, imports=imports)
    if not isinstance(made, Scheme):
        raise WakefulError(f"{given} is a grid; a scheme says of what: scheme(weights={given})")
    return made if scales is None else made.with_scales(scales)
