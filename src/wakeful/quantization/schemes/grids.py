"""Grids: number formats of quantized tensors, and which values share a scale.

x̂ = (q − z)·s with a scale s, a zero point z (0 where there is none) and q a whole number between
`low` and `high` (From Attention to Activation, section 5.2), or a number of an 8- or 4-bit floating
point format (OCP Microscaling Formats, version 1.0). All arithmetic is in float32.

Shapes: M tokens (or output channels, of weights), K input channels, G groups of them.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.variants import FieldVariant

Per = Literal["channel", "token", "head", "tensor"]
ScaleType = Literal["float32", "bfloat16"]
MOST_SCALES = 13
"""Most scales that `Grid.scales_to_try` returns."""
_SMALLEST = torch.finfo(torch.float32).tiny
_FACTORS = [1 + 0.04 * steps for steps in (1, *range(-1, -12, -1))]
"""Factors of the scale of a group to try beside 1."""


@dataclass(frozen=True)
class Scales:
    """Scales of a quantized tensor x (M, K), its zero points, and how they map to x.

    `scale` and `zero` are (M, 1), one per row; (1, 1), one for the tensor; or (M, G) in groups of
    `group` channels, of which the last may be shorter.
    """

    scale: Tensor
    zero: Tensor | None = None
    """int32, or None for a grid that is symmetric about zero."""
    outer: Tensor | None = None
    """A second factor of the step, (M, 1) or (1, 1), where the format has two levels of scales."""
    group: int = 0

    def expand(self, width: int) -> tuple[Tensor, Tensor | None]:
        """Return the step and the zero point in shapes that broadcast against x (M, `width`).

        The step is the scale times the outer scale; with groups both become (M, `width`).
        """
        step = self.scale if self.outer is None else self.scale * self.outer
        if not self.group:
            return step, self.zero

        def repeat(tensor: Tensor) -> Tensor:
            return tensor.repeat_interleave(self.group, 1)[:, :width]

        return repeat(step), None if self.zero is None else repeat(self.zero)

    def for_rows(self, rows: slice) -> "Scales":
        """Return the scales of a slice of the rows of x."""
        sliced = {
            name: tensor[rows]
            for name, tensor in vars(self).items()
            if isinstance(tensor, Tensor) and len(tensor) > 1  # a single row serves all rows of x
        }
        return replace(self, **sliced)

    def repeat(self, times: int) -> "Scales":
        """Return the scales of a tensor x whose M rows are repeated as a whole, `times` times."""
        repeated = {
            name: tensor.repeat(times, 1)
            for name, tensor in vars(self).items()
            if isinstance(tensor, Tensor) and (name != "outer" or len(tensor) > 1)
        }
        return replace(self, **repeated)


class Grid(FieldVariant, ABC):
    """A number format for quantization: the numbers q from `low` to `high` that values are rounded
    to, and how scales are computed.

    A scale is shared `per` output channel of weights, per token of activations, per head of keys or
    values, or per tensor. Within a channel or a token, each `group` of input channels may have a
    scale of its own.
    """

    symmetric: ClassVar[bool] = True
    """True where there is no zero point: q = 0 means x̂ = 0."""
    emulated: ClassVar[bool] = False
    """True where no kernel multiplies the codes, so that dequantized numbers are multiplied."""
    two_scales: ClassVar[bool] = False
    """True where the scale of a group is multiplied by an outer scale, one per channel, token or
    tensor as `per` says."""
    bits: int
    per: Per
    group: int = 0
    outer: Tensor | None = field(init=False, default=None, repr=False)
    """Outer scale, where several matrices share one that is fixed."""

    def __post_init__(self) -> None:
        """Raise `WakefulError` if the number of bits or the size of groups is not possible."""
        if not 2 <= self.bits <= 8:
            raise WakefulError(f"a grid has 2 to 8 bits, got {self.bits}")
        # Groups have no scales of their own if all channels share one.
        channels_share = self.per == "head" or (self.per == "tensor" and not self.two_scales)
        if self.group and (self.group < 2 or channels_share):
            raise WakefulError(
                f"a group is of 2 or more input channels of a channel or a token, not {self.group} "
                f"per {self.per}"
            )

    @property
    def scale_type(self) -> torch.dtype:
        """The dtype of a stored scale; an 8-bit floating-point type is stored as uint8."""
        return torch.float32

    @property
    def low(self) -> float:
        """The smallest number q of the format."""
        return -self.high

    @property
    def high(self) -> float:
        """The largest number q of the format."""
        return 2 ** (self.bits - 1) - 1

    @property
    def stored_bits(self) -> int:
        """Bits that one number takes in a file."""
        return 4 if self.bits <= 4 else 8

    @property
    def shares_outer_scale(self) -> bool:
        """True where matrices that multiply the same input have the same outer scale, as engines
        multiply them as one.
        """
        return self.two_scales and self.per == "tensor"

    def has_whole_groups(self, width: int) -> bool:
        """Tell whether `width` input channels are a whole number of groups."""
        return not self.group or width % self.group == 0

    def fit_scales(self, smallest: Tensor, largest: Tensor) -> Scales:
        """Return the scales for values between `smallest` and `largest`, tensors of one shape.

        If the two are equal, that value is represented exactly.
        """
        return Scales(_safe_step(_max_magnitude(smallest, largest), self.high))

    def compute_scales(self, x: Tensor, sequences: int = 1, outer: Tensor | None = None) -> Scales:
        """Return the scales of x (M, K): (M, 1) per row, (1, 1) per tensor, (M, G) in groups.

        Per tensor, each of `sequences` equally long sequences of rows gets its own scale, repeated
        for its rows: (M, 1). `outer` is a known scale of the rows or of the tensor: without groups
        it is returned; in a format with two levels of scales, those of groups are computed under
        it.
        """
        x = x.float()
        if outer is not None and not self.group:
            return Scales(outer)
        if self.per == "tensor" and not self.group and sequences > 1 and x.numel():
            smallest, largest = x.reshape(sequences, -1).aminmax(dim=1, keepdim=True)
            rows_each = x.shape[0] // sequences
            return self.fit_scales(
                smallest.repeat_interleave(rows_each, 0), largest.repeat_interleave(rows_each, 0)
            )
        smallest, largest = self.value_range(x)
        # Without groups this is `fit_scales`.
        return self.fit_group_scales(smallest, largest, outer, sequences)

    def value_range(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the minimum and the maximum of those values of x (M, K) in float32 that share a
        scale, as two tensors: (M, G) in groups, (M, 1) per row, (1, 1) per tensor.
        """
        if self.group:
            num_missing = -x.shape[1] % self.group
            if num_missing:  # fill the last group with its last value, which is in its range
                x = torch.cat((x, x[:, -1:].expand(-1, num_missing)), dim=1)
            extremes = x.unflatten(1, (-1, self.group)).aminmax(dim=2)
        elif self.per != "tensor":
            extremes = x.aminmax(dim=1, keepdim=True)
        else:
            x = x if x.numel() else x.new_zeros(1, 1)  # aminmax refuses a tensor of no token
            extremes = x.reshape(1, -1).aminmax(dim=1, keepdim=True)
        return extremes.min, extremes.max

    def fit_group_scales(
        self, smallest: Tensor, largest: Tensor, outer: Tensor | None = None, sequences: int = 1
    ) -> Scales:
        """Return the scales for values between `smallest` and `largest`, which `value_range`
        returns: (M, G) in groups.

        `outer` and `sequences` matter only in a format with two levels of scales: the outer scale
        if it is known, else the number of equally long sequences of rows that get one each.
        """
        return replace(self.fit_scales(smallest, largest), group=self.group)

    def scales_to_try(self, x: Tensor, outer: Tensor | None = None) -> list[Scales]:
        """Return scales for one group of channels, x (M, k), among which a search finds the best:
        the scales that `compute_scales` returns, and those for x times 1.04 and times 0.96 to 0.56.

        Each has one scale per row, (M, 1). `outer` is the outer scale, in a format that has one.
        """
        smallest, largest = self.value_range(x.float())
        tried = [self.compute_scales(x, outer=outer)]
        tried += [
            self.fit_group_scales(factor * smallest, factor * largest, outer) for factor in _FACTORS
        ]
        return [replace(scales, group=0) for scales in tried]

    def join_rows(self, parts: Sequence[Scales]) -> Scales:
        """Return the scales of all rows of a weight, given those of its slices; not for a format in
        which the whole weight has one scale.
        """
        names = ["scale", "zero"] if self.per == "tensor" else ["scale", "zero", "outer"]
        joined = {
            name: torch.cat([getattr(part, name) for part in parts])
            for name in names
            if getattr(parts[0], name) is not None
        }
        return replace(parts[0], **joined)

    def sum_per_scale(self, x: Tensor) -> Tensor:
        """Return the sums of x (M, K) over all values that share a scale: (M, G) in groups, (M, 1)
        per row, (1, 1) per tensor.
        """
        if self.group:
            x = torch.nn.functional.pad(x, (0, -x.shape[1] % self.group))  # fill the last group
            return x.unflatten(1, (-1, self.group)).sum(2)
        if self.per == "tensor":
            return x.sum().reshape(1, 1)
        return x.sum(1, keepdim=True)

    def scale_for_max(self, largest: Tensor) -> Tensor:
        """Return the scale for values with |x| up to `largest`, of its shape; in a format with two
        levels of scales it is the outer scale.
        """
        return self.fit_scales(-largest, largest).scale

    def with_outer_scale(self, outer: Tensor | None) -> "Grid":
        """Return a copy of this format whose outer scale is fixed, or no longer if it is None."""
        copied = copy.copy(self)
        copied.outer = outer
        return copied

    def round_to_levels(self, x: Tensor, scales: Scales) -> Tensor:
        """Return x (M, K) rounded to numbers of the format, q = clip(round(x / s) + z, low, high),
        as float32; halves round to even.
        """
        step, zero = scales.expand(x.shape[-1])
        q = (x.float() / step).round_()
        if zero is not None:
            q = q + zero
        return q.clamp_(self.low, self.high)

    def encode(self, levels: Tensor) -> Tensor:
        """Return the int8 codes by which numbers q are stored; codes of up to 4 bits are −8 to
        7.
        """
        return levels.to(torch.int8)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the numbers q that codes stand for."""
        return codes.to(dtype)

    def encode_scale(self, scale: Tensor) -> Tensor:
        """Return scales as they are stored: in `scale_type`, or the bytes of an 8-bit float as
        uint8.
        """
        scale = scale.to(self.scale_type)
        return scale.view(torch.uint8) if self.scale_type.itemsize == 1 else scale

    def decode_scale(self, codes: Tensor) -> Tensor:
        """Return stored scales as float32."""
        return (codes.view(self.scale_type) if self.scale_type.itemsize == 1 else codes).float()

    def quantize(self, x: Tensor, scales: Scales) -> Tensor:
        """Return the int8 codes of x (M, K) rounded to the format."""
        return self.encode(self.round_to_levels(x, scales))

    def dequantize(
        self, codes: Tensor, scales: Scales, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return the values x̂ = (q − z)·s that codes stand for."""
        return self.rescale(self.decode(codes, dtype), scales)

    def rescale(self, q: Tensor, scales: Scales) -> Tensor:
        """Return x̂ = (q − z)·s of numbers q, in place and in their dtype."""
        step, zero = scales.expand(q.shape[-1])
        if zero is not None:
            q = q.sub_(zero)
        return q.mul_(step.to(q.dtype))

    def fake_quantize(
        self, x: Tensor, scales: Scales, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return x̂, the values of x (M, K) rounded to the format, in `dtype`; a NaN stays a
        NaN.
        """
        return self.rescale(self.round_to_levels(x, scales).to(dtype), scales)

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Grid) and str(self) == str(value)

    def __hash__(self) -> int:
        return hash(str(self))


class Absmax(Grid):
    """Symmetric about zero: s = clip · max|x| / (2^(b−1) − 1), z = 0; for 8 bits q is −127 to 127.

    A `clip` below 1 clips the few largest numbers for a smaller step: on Gaussian inputs, such as a
    rotation gives, the error of 4 bits is least with 0.8 to 0.9 (QuaRot, 2404.00456, takes 0.9).

    `scale` is the dtype to which s is rounded before x is; engines read bfloat16.
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
        """Raise `WakefulError` if a field is out of its range."""
        super().__post_init__()
        if not 0 < self.clip <= 1:
            raise WakefulError(f"clip is {self.clip}: it is a share of max|x|, above 0 and up to 1")
        if self.scale not in get_args(ScaleType):
            raise WakefulError(f"scale is {self.scale!r}: it is float32 or bfloat16")

    @property
    def scale_type(self) -> torch.dtype:
        return getattr(torch, self.scale)

    def fit_scales(self, smallest: Tensor, largest: Tensor) -> Scales:
        """Return s = clip · max|x| / (2^(b−1) − 1), rounded to the dtype in which it is stored."""
        step = _safe_step(self.clip * _max_magnitude(smallest, largest), self.high)
        return Scales(step.to(self.scale_type).float())


class Zeropoint(Grid):
    """From the smallest to the largest: s = (max − min) / (2^b − 1), z = low − round(min / s)."""

    examples = ("zeropoint(bits=4, per='channel')", "zeropoint(bits=4, per='channel', group=128)")
    symmetric = False

    @property
    def low(self) -> float:
        return -self.high - 1

    def fit_scales(self, smallest: Tensor, largest: Tensor) -> Scales:
        """Return scale and zero point for values between `smallest` and `largest`.

        Where both are the same number c, there is no range to divide: the scale is |c|, so that c
        is the level next to that of zero. No scale is below max|x| / 2³⁰, so that z fits an int32.
        """
        smallest, largest = smallest.float(), largest.float()
        num_steps = 2**self.bits - 1
        is_constant = largest == smallest
        span = torch.where(is_constant, largest.abs() * num_steps, largest - smallest)
        scale = _safe_step(span, num_steps)
        scale = torch.maximum(scale, _max_magnitude(smallest, largest) / 2**30)
        zero = (self.low - torch.round(smallest / scale)).to(torch.int32)
        return Scales(scale, zero)


class Ggml(Grid):
    """llama.cpp's Q4_0, Q5_0 and Q8_0: groups of 32 share a scale s in float16.

    With b = 4 or 5 bits, s is the number farthest from zero divided by −2^(b−1), of either sign;
    with 8 bits it is max|x| / 127.
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
        """−2^(b−1) for 4 and 5 bits, −127 for 8."""
        return -self.high - (1 if self.bits < 8 else 0)

    @property
    def stored_bits(self) -> int:
        return self.bits

    def fit_scales(self, smallest: Tensor, largest: Tensor) -> Scales:
        """Return the scale of each group, rounded to float16; 1 where that is 0."""
        farthest = torch.where(smallest.abs() > largest.abs(), smallest, largest).float()
        # With 4 and 5 bits the farthest number gets the level −2^(b−1), which has no opposite.
        scale = farthest / self.low if self.bits < 8 else farthest.abs() / self.high
        scale = scale.half().float()
        return Scales(torch.where(scale == 0, torch.ones_like(scale), scale))


class _Float(Grid, ABC):
    """A floating-point number format, symmetric about zero, emulated in float32."""

    emulated = True
    largest: ClassVar[float]
    bits: int = field(init=False)

    @property
    def high(self) -> float:
        return self.largest

    @abstractmethod
    def round_to_format(self, x: Tensor) -> Tensor:
        """Return the number of the format nearest to each value of x; halves round to even, NaN
        stays NaN.
        """

    def round_to_levels(self, x: Tensor, scales: Scales) -> Tensor:
        """Return x (M, K) rounded to numbers of the format, those beyond its range clipped."""
        step, _ = scales.expand(x.shape[-1])
        return self.round_to_format((x.float() / step).clamp_(self.low, self.high))


class E4M3(_Float):
    """8-bit floats with 4 exponent and 3 mantissa bits, up to 448 (FP8 Formats for Deep Learning,
    2209.05433): s = max|x| / 448.
    """

    examples = ("e4m3(per='token')", "e4m3(per='channel', group=128)")
    largest = 448.0
    bits: int = field(init=False, default=8)

    def round_to_format(self, x: Tensor) -> Tensor:
        return x.to(torch.float8_e4m3fn).float()

    def encode(self, levels: Tensor) -> Tensor:
        return levels.to(torch.float8_e4m3fn).view(torch.int8)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return codes.view(torch.float8_e4m3fn).to(dtype)


class _E2M1(_Float):
    """4-bit floats ±{0, ½, 1, 1½, 2, 3, 4, 6}, with one scale per group."""

    largest = 6.0
    bits: int = field(init=False, default=4)

    def round_to_format(self, x: Tensor) -> Tensor:
        """Return the number of the format nearest to each value of x, which is −6 to 6 already."""
        # With p the largest power of two up to |x|, neighboring numbers are p/2 apart; below 1 they
        # are ½ apart. The exponent's bits of a float32 number, the others cleared, are p.
        power = (x.detach().view(torch.int32) & _EXPONENT_BITS).view(torch.float32)
        spacing = power.clamp_(min=1.0).mul_(0.5)
        return (x / spacing).round_().mul_(spacing)

    def encode(self, levels: Tensor) -> Tensor:
        """Return codes of 4 bits as int8 from −8 to 7: the index of |q| in `_E2M1_NUMBERS` in the
        three lowest bits, the sign in the fourth.
        """
        table = torch.tensor(_E2M1_NUMBERS, device=levels.device)
        index = torch.searchsorted(table, levels.abs().contiguous())
        return torch.where(levels < 0, index - 8, index).to(torch.int8)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        numbers = (*_E2M1_NUMBERS, *(-number for number in _E2M1_NUMBERS))
        return torch.tensor(numbers, dtype=dtype, device=codes.device)[(codes & 15).long()]


_EXPONENT_BITS = 0x7F800000
_E2M1_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes by the three lowest bits of the code; the fourth is the sign."""


class MxE2M1(_E2M1):
    """MXFP4: groups of 32 share s = 2^(e − 2), a power of two (OCP Microscaling Formats 1.0,
    section 5.3), with e = ⌊log₂ max|x|⌋, and one more from 1.75 · 2^e on, as vLLM and
    compressed-tensors compute.
    """

    name = "mx_e2m1"
    examples = ("mx_e2m1(per='channel')",)
    group: int = field(init=False, default=32)

    @property
    def scale_type(self) -> torch.dtype:
        return torch.float8_e8m0fnu

    def fit_scales(self, smallest: Tensor, largest: Tensor) -> Scales:
        """Return s = 2^(e − 2) for values between `smallest` and `largest`: e is ⌊log₂ max|x|⌋, and
        one more if max|x| is at least 1.75 times that power of two. Where all are zero, s is 1.
        """
        magnitude = _max_magnitude(smallest, largest)
        # frexp's fraction is ½ to 1, so that e = exponent − 1, and 1.75 · 2^e is at 0.875.
        fraction, exponent = torch.frexp(magnitude)
        e = exponent - 1 + (fraction >= 0.875)
        ones = torch.ones_like(magnitude)
        # The exponents of normal float32 numbers are −126 to 127.
        scale = torch.ldexp(ones, (e - 2).clamp(-126, 127))
        return Scales(torch.where(magnitude > 0, scale, ones))

    def scales_to_try(self, x: Tensor, outer: Tensor | None = None) -> list[Scales]:
        """Return the scale that `compute_scales` returns, its half and its double."""
        scale = self.compute_scales(x).scale
        # Scales below 2⁻¹²⁶ are no normal float32 numbers.
        return [Scales((scale * factor).clamp(2.0**-126, 2.0**127)) for factor in (1, 0.5, 2)]


class NvE2M1(_E2M1):
    """NVFP4: groups of 16 share a scale s in e4m3, under an outer scale t in float32 that `per`
    shares (the whole tensor in NVIDIA's format): t = max|x| / (6 · 448), s = e4m3(max|group| / 6t),
    x̂ = q·s·t.

    Matrices that multiply the same input share t, since engines multiply them as one.
    """

    name = "nv_e2m1"
    examples = ("nv_e2m1(per='tensor')", "nv_e2m1(per='channel')")
    two_scales = True
    group: int = field(init=False, default=16)

    @property
    def scale_type(self) -> torch.dtype:
        return torch.float8_e4m3fn

    def scale_for_max(self, largest: Tensor) -> Tensor:
        """Return the outer scale t, under which groups have scales up to the largest of e4m3."""
        return _safe_step(largest, self.largest * E4M3.largest)

    def fit_group_scales(
        self, smallest: Tensor, largest: Tensor, outer: Tensor | None = None, sequences: int = 1
    ) -> Scales:
        """Return the e4m3 scales of groups under an outer scale: `outer`, or else the format's
        fixed one, or else one computed here.

        `smallest` and `largest` (M, G) bound the groups of M rows, which are `sequences` equally
        long sequences.
        """
        group_max = _max_magnitude(smallest, largest)
        outer = self.outer if outer is None else outer
        if outer is None:
            outer = self._compute_outer_scale(group_max, sequences)
        scale = (group_max / self.largest / outer).clamp(_LEAST_E4M3, E4M3.largest)
        return Scales(scale.to(torch.float8_e4m3fn).float(), None, outer, self.group)

    def scales_to_try(self, x: Tensor, outer: Tensor | None = None) -> list[Scales]:
        """Return the scale that `compute_scales` returns, and the six e4m3 numbers below and above
        it (2605.12464 searches them to round to nearest); near an end of e4m3, some twice.
        """
        scales = replace(self.compute_scales(x, outer=outer), group=0)
        # Positive e4m3 numbers in their order have the codes 1 to 126.
        code = scales.scale.to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int16)
        steps = (0, *range(-1, -7, -1), *range(1, 7))
        codes = [(code + step).clamp(1, 126).to(torch.uint8) for step in steps]
        return [replace(scales, scale=self.decode_scale(neighbor)) for neighbor in codes]

    def _compute_outer_scale(self, group_max: Tensor, sequences: int) -> Tensor:
        """Return the outer scales, given the largest |x| of each group, `group_max` (M, G).

        There is one per row, (M, 1); or, `per` tensor, one per sequence of rows, repeated for its
        rows, (M, 1), or (1, 1) if `sequences` is 1.
        """
        if not group_max.numel():  # no tokens: amax refuses an empty tensor
            return self.scale_for_max(group_max.new_zeros(1, 1))
        sharing = group_max.reshape(sequences, -1) if self.per == "tensor" else group_max
        outer = self.scale_for_max(sharing.amax(1, keepdim=True))
        if 1 < len(outer) < len(group_max):  # one for each of several sequences
            outer = outer.repeat_interleave(len(group_max) // len(outer), 0)
        return outer


_LEAST_E4M3 = 2.0**-9


def _max_magnitude(smallest: Tensor, largest: Tensor) -> Tensor:
    return torch.maximum(smallest.abs(), largest.abs()).float()


def _safe_step(span: Tensor, num_steps: float) -> Tensor:
    """Return span / num_steps, or 1 where that is no normal float32 number: x then rounds to 0."""
    step = span / num_steps
    return torch.where(step < _SMALLEST, torch.ones_like(step), step)
