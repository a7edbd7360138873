"""Grids: the numbers that real ones are rounded to, and who shares a scale.

x̂ = (q − z)·s with a scale s, a zero point z (0 where there is none) and q a whole number between
`low` and `high` (From Attention to Activation, section 5.2), or a number of an 8- or 4-bit floating
point format (OCP Microscaling Formats, version 1.0). All arithmetic is in float32.

Shapes: M tokens (or output channels, of weights), K input channels, G groups of them.
"""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.variants import FieldVariant

Per = Literal["channel", "token", "tensor"]
ScaleType = Literal["float32", "bfloat16"]
_SMALLEST = torch.finfo(torch.float32).tiny


@dataclass(frozen=True)
class Scales:
    """The step of a grid and the number that means zero.

    Both are (M, 1) or (1, 1), or of `group` channels each (M, G); the last group may be shorter.
    """

    scale: Tensor
    zero: Tensor | None = None
    """int32, or None for a grid that is symmetric about zero."""
    outer: Tensor | None = None
    """A second factor of the step, (M, 1) or (1, 1), where the format has two levels of scales."""
    group: int = 0

    def over(self, width: int) -> tuple[Tensor, Tensor | None]:
        """Return the step and the zero point, to broadcast against x (M, `width`)."""
        step = self.scale if self.outer is None else self.scale * self.outer
        if not self.group:
            return step, self.zero
        step, zero = (
            None if tensor is None else tensor.repeat_interleave(self.group, 1)[:, :width]
            for tensor in (step, self.zero)
        )
        assert step is not None
        return step, zero

    def of_rows(self, rows: slice) -> "Scales":
        """Return the scales of some rows of x."""
        parts = {
            name: tensor[rows]
            for name, tensor in vars(self).items()
            if isinstance(tensor, Tensor) and len(tensor) > 1
        }
        return replace(self, **parts)

    def at(self, channel: int) -> "Scales":
        """Return the scales of one channel of x, (M, 1)."""
        if not self.group:
            return self
        column = slice(channel // self.group, channel // self.group + 1)
        zero = None if self.zero is None else self.zero[:, column]
        return Scales(self.scale[:, column], zero, self.outer)


class Grid(FieldVariant, ABC):
    """The whole numbers from `low` to `high`, the mapping of a range to them, and the scales.

    `per` is an output channel of weights, a token of activations, or the whole tensor. Within a
    channel or a token, each `group` of input channels may have a scale of its own.
    """

    symmetric: ClassVar[bool] = True
    """True where zero means zero, so that there is no zero point."""
    emulated: ClassVar[bool] = False
    """True where products are those of the dequantized numbers, for want of a kernel."""
    name_of_format: ClassVar[str] = ""
    """Name, where that is not its bits."""
    two_scales: ClassVar[bool] = False
    """True where a group's scale is a multiple of that which `per` shares."""
    bits: int
    per: Per
    group: int = 0
    outer: Tensor | None = field(init=False, default=None, repr=False)
    """Outer scale that `per` shares, where several matrices have one."""

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise WakefulError(f"a grid has 2 to 8 bits, got {self.bits}")
        if self.group and (self.group < 2 or (self.per == "tensor" and not self.two_scales)):
            raise WakefulError(
                f"a group is of 2 or more input channels of a channel or a token, not {self.group} "
                f"per {self.per}"
            )

    @property
    def scale_type(self) -> torch.dtype:
        """The format of a scale; one of 8 bits is stored as uint8, others as they are."""
        return torch.float32

    @property
    def low(self) -> float:
        """The smallest number."""
        return -self.high

    @property
    def high(self) -> float:
        """The largest number."""
        return 2 ** (self.bits - 1) - 1

    @property
    def description(self) -> str:
        """Say what it is: "4-bit {} per channel in groups of 128", where {} is what it is of."""
        groups = f" in groups of {self.group}" if self.group else ""
        return f"{self.name_of_format or f'{self.bits}-bit'} {{}} per {self.per}{groups}"

    @property
    def stored_bits(self) -> int:
        """Bits of a number in a file."""
        return 4 if self.bits <= 4 else 8

    def divides(self, width: int) -> bool:
        """Tell whether so many channels are whole groups."""
        return not self.group or width % self.group == 0

    def fit(self, smallest: Tensor, largest: Tensor) -> Scales:
        """Return the scales for values between `smallest` and `largest` (tensors of one shape).

        A range that is one point is represented exactly.
        """
        return Scales(_step(_largest(smallest, largest), self.high))

    def scales_of(self, x: Tensor, sequences: int = 1, outer: Tensor | None = None) -> Scales:
        """Return the scales of x (M, K): (M, 1) for a scale a row, (1, 1) for one per tensor.

        Of several equally long `sequences` each has its own per tensor, repeated for its rows. What
        `per` shares may be given as `outer`.
        """
        x = x.float()
        if outer is not None and not self.group:
            return Scales(outer)
        if self.group or self.per != "tensor" or sequences == 1 or not x.numel():
            return self.scales_between(*self.bounds(x), outer, sequences)
        smallest, largest = x.reshape(sequences, -1).aminmax(dim=1, keepdim=True)
        rows = x.shape[0] // sequences
        return self.fit(smallest.repeat_interleave(rows, 0), largest.repeat_interleave(rows, 0))

    def bounds(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the smallest and the largest of the numbers that share a scale, of x (M, K) in
        float32: (M, G) of groups, (M, 1) of rows, (1, 1) per tensor.
        """
        if self.group:
            short = -x.shape[1] % self.group
            if short:
                x = torch.cat((x, x[:, -1:].expand(-1, short)), dim=1)
            extremes = x.unflatten(1, (-1, self.group)).aminmax(dim=2)
        elif self.per != "tensor":
            extremes = x.aminmax(dim=1, keepdim=True)
        else:
            x = x if x.numel() else x.new_zeros(1, 1)  # of no token
            extremes = x.reshape(1, -1).aminmax(dim=1, keepdim=True)
        return extremes.min, extremes.max

    def scales_between(
        self, smallest: Tensor, largest: Tensor, outer: Tensor | None = None, sequences: int = 1
    ) -> Scales:
        """Return the scales of numbers within `bounds`, under an outer scale where it is given, or
        one of each of so many `sequences`.
        """
        return replace(self.fit(smallest, largest), group=self.group)

    def shared_sum(self, x: Tensor) -> Tensor:
        """Return the sums of x (M, K) over what shares a scale, in the shape of `bounds`."""
        if self.group:
            x = torch.nn.functional.pad(x, (0, -x.shape[1] % self.group))
            return x.unflatten(1, (-1, self.group)).sum(2)
        return x.sum().reshape(1, 1) if self.per == "tensor" else x.sum(1, keepdim=True)

    def shared_scale(self, largest: Tensor) -> Tensor:
        """Return the scale that `per` shares where |x| goes up to `largest`."""
        return self.fit(-largest, largest).scale

    def under(self, outer: Tensor | None) -> "Grid":
        """Return this grid with what `per` shares given."""
        copied = copy.copy(self)
        copied.outer = outer
        return copied

    def refit(self, x: Tensor, scales: Scales) -> Scales:
        """Return the scales of x (M, k), one whole group, under the outer scale of `scales`."""
        return self.scales_of(x, outer=scales.outer)

    def levels(self, x: Tensor, scales: Scales) -> Tensor:
        """Return q = clip(round(x / s) + z, low, high) as float32; halves round to even."""
        step, zero = scales.over(x.shape[-1])
        q = (x.float() / step).round_()
        if zero is not None:
            q = q + zero
        return q.clamp_(self.low, self.high)

    def encode(self, levels: Tensor) -> Tensor:
        """Return what stands for q in memory, int8; of up to 4 bits from −8 to 7."""
        return levels.to(torch.int8)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return q of its codes."""
        return codes.to(dtype)

    def encode_scale(self, scale: Tensor) -> Tensor:
        """Return what stands for a scale in memory."""
        scale = scale.to(self.scale_type)
        return scale.view(torch.uint8) if self.scale_type.itemsize == 1 else scale

    def decode_scale(self, codes: Tensor) -> Tensor:
        """Return the scale of its codes, float32."""
        return (codes.view(self.scale_type) if self.scale_type.itemsize == 1 else codes).float()

    def quantize(self, x: Tensor, scales: Scales) -> Tensor:
        """Return the codes of q, int8."""
        return self.encode(self.levels(x, scales))

    def dequantize(
        self, codes: Tensor, scales: Scales, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return x̂ = (q − z)·s."""
        return self.values(self.decode(codes, dtype), scales)

    def values(self, q: Tensor, scales: Scales) -> Tensor:
        """Return x̂ of q, in its type and in its memory."""
        step, zero = scales.over(q.shape[-1])
        if zero is not None:
            q = q.sub_(zero)
        return q.mul_(step.to(q.dtype))

    def fake_quantize(
        self, x: Tensor, scales: Scales, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return x̂ of x: numbers that lie on the grid; a NaN stays one."""
        return self.values(self.levels(x, scales).to(dtype), scales)

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Grid) and str(self) == str(value)

    def __hash__(self) -> int:
        return hash(str(self))


class Absmax(Grid):
    """Symmetric about zero: s = clip · max|x| / (2^(b−1) − 1), z = 0; for 8 bits q is −127 to 127.

    A `clip` below 1 gives the few largest numbers up for a finer step: of the Gaussian inputs that
    a rotation leaves, 4 bits hold most with 0.8 to 0.9 (QuaRot, 2404.00456, takes 0.9).

    `scale` is the type of s, to which it is rounded before the numbers are: two bytes of bfloat16
    are what engines read.
    """

    examples = (
        "absmax(bits=8, per='token')",
        "absmax(bits=4, per='channel', group=32)",
        "absmax(bits=4, per='token', clip=0.9)",
        "absmax(bits=4, per='channel', group=64, scale='bfloat16')",
    )
    clip: float = 1.0
    scale: ScaleType = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.clip <= 1:
            raise WakefulError(f"clip is {self.clip}: it is a share of max|x|, above 0 and up to 1")
        if self.scale not in get_args(ScaleType):
            raise WakefulError(f"scale is {self.scale!r}: it is float32 or bfloat16")

    @property
    def scale_type(self) -> torch.dtype:
        return getattr(torch, self.scale)

    @property
    def description(self) -> str:
        clipped = "" if self.clip == 1 else f", clipped at {self.clip:g} of the largest"
        return super().description + clipped

    def fit(self, smallest: Tensor, largest: Tensor) -> Scales:
        step = _step(self.clip * _largest(smallest, largest), self.high)
        return Scales(step.to(self.scale_type).float())


class Zeropoint(Grid):
    """From the smallest to the largest: s = (max − min) / (2^b − 1), z = low − round(min / s)."""

    examples = ("zeropoint(bits=4, per='channel')", "zeropoint(bits=4, per='channel', group=128)")
    symmetric = False

    @property
    def low(self) -> float:
        return -self.high - 1

    def fit(self, smallest: Tensor, largest: Tensor) -> Scales:
        smallest, largest = smallest.float(), largest.float()
        # A constant c has no range to divide: with the step |c|, the level next to zero is c.
        span = torch.where(largest == smallest, largest.abs() * (2**self.bits - 1),
                           largest - smallest)  # fmt: skip
        scale = _step(span, 2**self.bits - 1)
        # No finer than float32 tells numbers of this size from each other, so that z is an int32.
        scale = torch.maximum(scale, _largest(smallest, largest) / 2**30)
        return Scales(scale, (self.low - torch.round(smallest / scale)).to(torch.int32))


class Ggml(Grid):
    """llama.cpp's Q4_0, Q5_0 and Q8_0: groups of 32 share s in float16. With 4 and 5 bits s is the
    number farthest from zero over −2^(b−1), of either sign; with 8 it is max|x| / 127.
    """

    examples = ("ggml(bits=4)", "ggml(bits=5)", "ggml(bits=8)")
    per: Per = field(init=False, default="channel")
    group: int = field(init=False, default=32)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in (4, 5, 8):
            raise WakefulError(f"ggml has 4, 5 or 8 bits, got {self.bits}")

    @property
    def scale_type(self) -> torch.dtype:
        return torch.float16

    @property
    def low(self) -> float:
        return -self.high - (self.bits < 8)

    @property
    def stored_bits(self) -> int:
        return self.bits

    @property
    def description(self) -> str:
        return f"Q{self.bits}_0 {{}}"

    def fit(self, smallest: Tensor, largest: Tensor) -> Scales:
        farthest = torch.where(smallest.abs() > largest.abs(), smallest, largest).float()
        step = (farthest / self.low if self.bits < 8 else farthest.abs() / self.high).half().float()
        return Scales(torch.where(step == 0, torch.ones_like(step), step))


class _Float(Grid, ABC):
    """Numbers of a floating point format, symmetric about zero; no kernel of ours multiplies them,
    so they are emulated in float32.
    """

    emulated = True
    largest: ClassVar[float]
    bits: int = field(init=False)

    @property
    def high(self) -> float:
        return self.largest

    @abstractmethod
    def nearest(self, x: Tensor) -> Tensor:
        """Return the number of the format next to each of x; halves to even, NaN to NaN."""

    def levels(self, x: Tensor, scales: Scales) -> Tensor:
        step, _ = scales.over(x.shape[-1])
        return self.nearest((x.float() / step).clamp_(self.low, self.high))


class E4M3(_Float):
    """8-bit floats of 4 exponent and 3 mantissa bits up to 448 (FP8 Formats for Deep Learning,
    2209.05433): s = max|x| / 448.
    """

    examples = ("e4m3(per='token')", "e4m3(per='channel', group=128)")
    name_of_format = "fp8 (e4m3)"
    largest = 448.0
    bits: int = field(init=False, default=8)

    def nearest(self, x: Tensor) -> Tensor:
        return x.to(torch.float8_e4m3fn).float()

    def encode(self, levels: Tensor) -> Tensor:
        return levels.to(torch.float8_e4m3fn).view(torch.int8)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.view(torch.float8_e4m3fn).to(dtype)


class _E2M1(_Float):
    """4-bit floats ±{0, ½, 1, 1½, 2, 3, 4, 6} in groups with a scale each."""

    largest = 6.0
    bits: int = field(init=False, default=4)

    def nearest(self, x: Tensor) -> Tensor:
        # Half the power of two at or below |x|, which its exponent's bits are; ½ below 1 too.
        power = (x.detach().view(torch.int32) & _EXPONENT).view(torch.float32)
        unit = power.clamp_(min=1.0).mul_(0.5)
        return (x / unit).round_().mul_(unit)

    def encode(self, levels: Tensor) -> Tensor:
        table = torch.tensor(_E2M1_NUMBERS, device=levels.device)
        code = torch.searchsorted(table, levels.abs().contiguous())
        return torch.where(levels < 0, code - 8, code).to(torch.int8)  # the sign is the top bit

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        numbers = (*_E2M1_NUMBERS, *(-number for number in _E2M1_NUMBERS))
        return torch.tensor(numbers, dtype=dtype, device=codes.device)[(codes & 15).long()]


_EXPONENT = 0x7F800000
_E2M1_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""By code; the sign's bit comes before the three of the code."""


class MxE2M1(_E2M1):
    """MXFP4: groups of 32 share s = 2^(e − 2), a power of two (OCP Microscaling Formats 1.0,
    section 5.3), with e = ⌊log₂ max|x|⌋, and one more from 1.75 · 2^e on, as vLLM and
    compressed-tensors compute.
    """

    name = "mx_e2m1"
    examples = ("mx_e2m1(per='channel')",)
    name_of_format = "MXFP4"
    group: int = field(init=False, default=32)

    @property
    def scale_type(self) -> torch.dtype:
        return torch.float8_e8m0fnu

    def fit(self, smallest: Tensor, largest: Tensor) -> Scales:
        size = _largest(smallest, largest)
        fraction, exponent = torch.frexp(size)  # from ½ to 1
        exponent = exponent + (fraction >= 0.875) - 3
        ones = torch.ones_like(size)
        scale = torch.ldexp(ones, exponent.clamp(-126, 127))
        return Scales(torch.where(size > 0, scale, ones))


class NvE2M1(_E2M1):
    """NVFP4: groups of 16 share a scale s of e4m3 under one t in float32 that `per` shares (the
    tensor's, in NVIDIA's): t = max|x| / (6 · 448), s = e4m3(max|group| / 6t), x̂ = q·s·t.

    Matrices that read one tensor share t, since engines multiply them as one.
    """

    name = "nv_e2m1"
    examples = ("nv_e2m1(per='tensor')", "nv_e2m1(per='channel')")
    name_of_format = "NVFP4"
    two_scales = True
    group: int = field(init=False, default=16)

    @property
    def scale_type(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def shared_scale(self, largest: Tensor) -> Tensor:
        return _step(largest, self.largest * E4M3.largest)

    def scales_between(
        self, smallest: Tensor, largest: Tensor, outer: Tensor | None = None, sequences: int = 1
    ) -> Scales:
        size = _largest(smallest, largest)
        outer = self.outer if outer is None else outer
        if outer is None:
            top = size
            if self.per == "tensor":
                top = size.reshape(sequences if size.numel() else 1, -1)
            top = top.amax(1, keepdim=True) if top.numel() else size.new_zeros(1, 1)
            outer = self.shared_scale(top)
            if 1 < outer.shape[0] < size.shape[0]:
                outer = outer.repeat_interleave(size.shape[0] // outer.shape[0], 0)
        return Scales(_rounded_e4m3(size / self.largest / outer), None, outer, self.group)


def _rounded_e4m3(scale: Tensor) -> Tensor:
    return scale.clamp(_LEAST_E4M3, E4M3.largest).to(torch.float8_e4m3fn).float()


_LEAST_E4M3 = 2.0**-9


def _largest(smallest: Tensor, largest: Tensor) -> Tensor:
    return torch.maximum(smallest.abs(), largest.abs()).float()


def _step(size: Tensor, levels: float) -> Tensor:
    """Return size / levels, or 1 where that is not a normal number: all of it then rounds to 0."""
    step = size / levels
    return torch.where(step < _SMALLEST, torch.ones_like(step), step)
