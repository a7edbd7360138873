"""Grids of whole numbers and the two ways to lay real numbers on them.

x̂ = (q − z)·s with a scale s, a zero point z (0 where there is none) and q a whole number between
`low` and `high` (From Attention to Activation, section 5.2). All arithmetic is in float32.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from wakeful.errors import WakefulError

_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Scales:
    """The step of a grid and the whole number that means zero; both broadcast against x."""

    scale: Tensor
    zero: Tensor | None = None
    """int32, or None for a grid that is symmetric about zero."""


class Grid(ABC):
    """The whole numbers from `low` to `high` and how a range of real numbers is laid on them."""

    bits: int

    @property
    @abstractmethod
    def low(self) -> int:
        """The smallest whole number."""

    @property
    @abstractmethod
    def high(self) -> int:
        """The largest whole number."""

    @abstractmethod
    def fit(self, smallest: Tensor, largest: Tensor) -> Scales:
        """Return the scales for values between `smallest` and `largest` (tensors of one shape).

        A range that is one point is represented exactly.
        """

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

    @final
    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}{self.bits}"


@final
@dataclass(frozen=True)
class Absmax(Grid):
    """Symmetric about zero: s = max|x| / (2^(b−1) − 1), z = 0; for 8 bits q is −127 to 127."""

    bits: int = 8

    def __post_init__(self) -> None:
        _check_bits(self.bits)

    @property
    def low(self) -> int:
        return -self.high

    @property
    def high(self) -> int:
        return 2 ** (self.bits - 1) - 1

    def fit(self, smallest: Tensor, largest: Tensor) -> Scales:
        return Scales(_step(torch.maximum(smallest.abs(), largest.abs()).float(), self.high))


@final
@dataclass(frozen=True)
class Zeropoint(Grid):
    """From the smallest to the largest: s = (max − min) / (2^b − 1), z = low − round(min / s)."""

    bits: int = 4

    def __post_init__(self) -> None:
        _check_bits(self.bits)

    @property
    def low(self) -> int:
        return -(2 ** (self.bits - 1))

    @property
    def high(self) -> int:
        return 2 ** (self.bits - 1) - 1

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


def _check_bits(bits: int) -> None:
    if not 2 <= bits <= 8:
        raise WakefulError(f"a grid has 2 to 8 bits, got {bits}")


def pack(q: Tensor) -> Tensor:
    """Return whole numbers from −8 to 7, (N, K) int8, two to a byte: (N, ⌈K/2⌉) uint8.

    The even columns are the low halves; an odd K is padded with a zero.
    """
    if q.shape[1] % 2:
        q = torch.nn.functional.pad(q, (0, 1))
    halves = (q & 15).to(torch.uint8)
    return halves[:, ::2] | (halves[:, 1::2] << 4)


def unpack(packed: Tensor, width: int) -> Tensor:
    """Return the (N, `width`) int8 numbers that `pack` put into bytes."""
    rows, columns = packed.shape
    halves = unpack_halves(packed, packed.new_empty((rows, 2, columns)))
    return torch.stack(halves.unbind(1), dim=-1).flatten(1)[:, :width].to(torch.int8) - 8


def unpack_halves(packed: Tensor, out: Tensor) -> Tensor:
    """Fill `out`, (N, 2, ⌈K/2⌉) uint8, with the numbers plus 8: the even columns, then the odd.

    So they lie in the bytes; putting them in order takes longer than all else. The pad of an odd K
    comes last.
    """
    torch.bitwise_and(packed, 15, out=out[:, 0])
    torch.bitwise_right_shift(packed, 4, out=out[:, 1])
    return out.bitwise_xor_(8)  # a half of 8 and more stands for itself minus 16
