"""Two ways to compute one quantized linear layer, which agree to the rounding of float32.

Shapes: M tokens, K input channels, N output channels. `reference` is the definition: numbers that
lie on their grids, and their product. `integer` multiplies the int8 numbers and adds them up in
int32, which is exact.

Where inputs are quantized, the product is scaled in float64 and rounded to float32 once. In float32
the two would differ in the last bit, which sooner or later puts an activation of a later layer on
the other side of a rounding, and after a few layers two right answers are as far from each other as
either is from the full-precision model.
"""

import functools
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int8
from torch import Tensor

from wakeful.paged import AT_ONCE
from wakeful.quantization.schemes import Grid, Scales

Arithmetic = Literal["reference", "integer"]
_EXACT_COLUMNS = 2**10
"""Products of int8 numbers are 2¹⁴ at most; float32 adds integers up to 2²⁴ exactly."""
_OF_BYTES = {4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""A type of so many bytes, to move two numbers as one."""


@dataclass(frozen=True)
class Operands:
    """A layer's weights on their grid.

    `stored` is (N, K) int8, or (N, ⌈K/2⌉) uint8 with two numbers a byte (see `pack`): whole
    numbers, or the codes of other formats.
    """

    grid: Grid
    stored: Tensor
    scales: Scales
    width: int

    @property
    def packed(self) -> bool:
        """True where two numbers share a byte."""
        return self.stored.dtype == torch.uint8

    @functools.cached_property
    def integers(self) -> Int8[Tensor, "N K"]:
        """The whole numbers or codes, one a byte."""
        return unpack(self.stored, self.width) if self.packed else self.stored

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "N K"]:
        """Ŵ."""
        height, at_once = self.stored.shape[0], max(1, AT_ONCE // self.width)
        if height <= at_once:
            return self.grid.values(self._numbers(dtype), self.scales)
        weight = torch.empty(height, self.width, dtype=dtype, device=self.stored.device)
        for begin in range(0, height, at_once):
            rows = slice(begin, begin + at_once)
            part = Operands(self.grid, self.stored[rows], self.scales.of_rows(rows), self.width)
            weight[rows] = part.dequantized(dtype)
        return weight

    def _numbers(self, dtype: torch.dtype) -> Float[Tensor, "N K"]:
        """q."""
        if not self.packed:
            return self.grid.decode(self.stored, dtype)
        # A byte's two numbers are looked up together, as one of twice their size.
        every = torch.arange(256, dtype=torch.uint8, device=self.stored.device).unsqueeze(1)
        pairs = self.grid.decode(unpack(every, 2), dtype).view(_OF_BYTES[2 * dtype.itemsize])
        numbers = pairs.flatten().index_select(0, self.stored.flatten().int())
        return numbers.view(dtype).view(len(self.stored), -1)[:, : self.width]


def reference_product(
    x: Float[Tensor, "M K"],
    inputs: Grid | None,
    scales: Scales | None,
    weights: Operands,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "M N"]:
    """Return x̂ Ŵᵀ from dequantized numbers, in `dtype` where inputs are quantized."""
    if inputs is None or scales is None:
        return F.linear(x, weights.dequantized())
    x = inputs.fake_quantize(x, scales, dtype)
    return F.linear(x, weights.dequantized(dtype)).float()


emulated = functools.partial(reference_product, dtype=torch.float32)
"""The same where there is no other path to agree with to the bit."""


def integer(
    x: Float[Tensor, "M K"], inputs: Grid | None, scales: Scales | None, weights: Operands
) -> Float[Tensor, "M N"]:
    """Return s_x s_w (q_x q_wᵀ − z_w Σ q_x) by int32 sums; without q_x, s_w (x (q_w − z_w)ᵀ)."""
    if inputs is None or scales is None:
        if weights.grid.group:
            return reference_product(x, None, None, weights)
        return _weight_only_product(x, weights)
    q, zero = inputs.quantize(x, scales), weights.scales.zero
    sums = integer_matmul(q, weights.integers)
    if zero is not None:
        # A narrow range far from zero has a zero point that 32 bits would not carry.
        sums = sums.long() - q.sum(1, keepdim=True, dtype=torch.int64) * zero.T.long()
    return (sums.double() * scales.scale * weights.scales.scale.T).float()


def _weight_only_product(x: Float[Tensor, "M K"], weights: Operands) -> Float[Tensor, "M N"]:
    """Return s_w (x (q_w − z_w)ᵀ): scaling the product takes one pass less than the weights."""
    step, zero = weights.scales.over(weights.width)
    if weights.packed:
        # Columns of x are put in the order of the packed halves, which are q + 8 after the xor.
        x = torch.cat((x[:, ::2], F.pad(x[:, 1::2], (0, weights.width % 2))), dim=1)
        halves = torch.cat((weights.stored & 15, weights.stored >> 4), dim=1).bitwise_xor_(8)
        numbers = halves.to(x.dtype).sub_(8 if zero is None else zero + 8)
    else:
        numbers = weights.grid.decode(weights.stored, x.dtype)
        numbers = numbers if zero is None else numbers.sub_(zero)
    return F.linear(x, numbers) * step.T


LINEARS = {"reference": reference_product, "integer": integer}


def integer_matmul(a: Int8[Tensor, "M K"], b: Int8[Tensor, "N K"]) -> Int[Tensor, "M N"]:
    """Return a bᵀ exactly, in int32."""
    if a.is_cuda:
        return _padded_matmul(a, b)
    if a.device.type == "cpu" and _processor_multiplies_int8():
        if a.shape[1] == 1:  # torch 2.13 gives wrong numbers for a single column
            a, b = F.pad(a, (0, 1)), F.pad(b, (0, 1))
        return torch._int_mm(a, b.T)
    return _by_floats(a, b)


def _by_floats(a: Tensor, b: Tensor) -> Tensor:
    """Return a bᵀ from float32's fast kernels, by blocks of columns whose sums are exact."""
    total = a.new_zeros((a.shape[0], b.shape[0]), dtype=torch.int32)
    columns = zip(a.split(_EXACT_COLUMNS, dim=1), b.split(_EXACT_COLUMNS, dim=1), strict=True)
    for a_part, b_part in columns:
        total += (a_part.float() @ b_part.float().T).int()
    return total


def _padded_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a bᵀ by cuBLAS, which takes more than 16 rows and multiples of 8 elsewhere."""
    rows, columns = a.shape[0], b.shape[0]
    wide = -a.shape[1] % 8
    a = F.pad(a, (0, wide, 0, max(0, 17 - rows)))
    b = F.pad(b, (0, wide, 0, -columns % 8))
    return torch._int_mm(a, b.T)[:rows, :columns]


@functools.cache
def _processor_multiplies_int8() -> bool:
    """Tell whether there is an int8 kernel worth using: fast, and adding up without saturating.

    Without VNNI `torch._int_mm` is a plain loop, 30 times slower than float32's product on AVX2, or
    adds pairs of products in 16 bits, which overflows at 127².
    """
    if not torch.cpu._is_vnni_supported():
        return False
    largest = torch.full((32, 64), 127, dtype=torch.int8)
    signs = torch.where(torch.arange(32) % 2 == 0, 1, -1).to(torch.int8).unsqueeze(1)
    expected = _by_floats(largest, largest * signs)
    return torch.equal(torch._int_mm(largest, (largest * signs).T), expected)


def pack(q: Tensor) -> Tensor:
    """Return whole numbers from −8 to 7, (N, K) int8, two to a byte: (N, ⌈K/2⌉) uint8.

    The even columns are the low halves; an odd K is padded with a zero.
    """
    if q.shape[1] % 2:
        q = F.pad(q, (0, 1))
    halves = (q & 15).to(torch.uint8)
    return halves[:, ::2] | (halves[:, 1::2] << 4)


def unpack(packed: Tensor, width: int) -> Tensor:
    """Return the (N, `width`) int8 numbers that `pack` put into bytes."""
    halves = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)[:, :width]
    return (halves ^ 8).to(torch.int8) - 8  # a half of 8 and more stands for itself minus 16
