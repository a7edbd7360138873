"""Two ways to compute one quantized linear layer, which agree to the rounding of float32.

Shapes: M tokens, K input channels, N output channels. `reference_product` is the definition: the
product of dequantized numbers. `integer_product` multiplies the int8 codes and adds the products up
in int32, which is exact.

Where inputs are quantized, the product is scaled in float64 and rounded to float32 once. In float32
the two would differ in the last bit, which sooner or later puts an activation of a later layer on
the other side of a rounding, and after a few layers two right answers are as far from each other as
either is from the full-precision model.
"""

import functools
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int8
from torch import Tensor

from wakeful.paged import AT_ONCE
from wakeful.quantization.schemes import Grid, Scales

_MAX_EXACT_COLUMNS = 2**10
"""Products of int8 numbers are 2¹⁴ at most; float32 adds integers up to 2²⁴ exactly."""
_DTYPE_OF_SIZE = {4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Type of that many bytes, by which two numbers are moved as one."""


@dataclass(frozen=True)
class Operands:
    """A layer's quantized weights (N, K) with their scales.

    `stored` holds the codes: (N, K) int8, or (N, ⌈K/2⌉) uint8 with two 4-bit codes per byte (see
    `pack_int4`). In an integer format a code is the whole number itself.
    """

    grid: Grid
    stored: Tensor
    scales: Scales
    width: int

    @property
    def packed(self) -> bool:
        """True where two codes share a byte."""
        return self.stored.dtype == torch.uint8

    @functools.cached_property
    def integers(self) -> Int8[Tensor, "N K"]:
        """The codes, one per byte."""
        return unpack_int4(self.stored, self.width) if self.packed else self.stored

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "N K"]:
        """Return the dequantized weights Ŵ, computed a slice of rows at a time to save memory."""
        height, rows_at_once = self.stored.shape[0], max(1, AT_ONCE // self.width)
        if height <= rows_at_once:
            return self.grid.rescale(self._decode_codes(dtype), self.scales)
        weight = torch.empty(height, self.width, dtype=dtype, device=self.stored.device)
        for begin in range(0, height, rows_at_once):
            rows = slice(begin, begin + rows_at_once)
            part = Operands(self.grid, self.stored[rows], self.scales.for_rows(rows), self.width)
            weight[rows] = part.dequantize(dtype)
        return weight

    def _decode_codes(self, dtype: torch.dtype) -> Float[Tensor, "N K"]:
        """Return the numbers q that the codes stand for, before scaling.

        The two codes of a packed byte are decoded by one table look-up.
        """
        if not self.packed:
            return self.grid.decode(self.stored, dtype)
        all_bytes = torch.arange(256, dtype=torch.uint8, device=self.stored.device).unsqueeze(1)
        number_pairs = self.grid.decode(unpack_int4(all_bytes, 2), dtype)
        # Each pair is looked up as one element of twice the size.
        table = number_pairs.view(_DTYPE_OF_SIZE[2 * dtype.itemsize]).flatten()
        pairs = table.index_select(0, self.stored.flatten().int())
        numbers = pairs.view(dtype).view(len(self.stored), -1)
        return numbers[:, : self.width]  # without the padding of an odd width


def reference_product(
    x: Float[Tensor, "M K"],
    inputs: Grid | None,
    scales: Scales | None,
    weights: Operands,
    dtype: torch.dtype = torch.float64,
) -> Float[Tensor, "M N"]:
    """Return x̂ Ŵᵀ of dequantized inputs and weights, computed in `dtype`, as float32; x Ŵᵀ in
    float32 where inputs are not quantized.

    `inputs` is the number format of the inputs and `scales` their scales, both None for inputs in
    full precision.
    """
    if inputs is None or scales is None:
        return F.linear(x, weights.dequantize())
    x = inputs.fake_quantize(x, scales, dtype)
    return F.linear(x, weights.dequantize(dtype)).float()


emulated_product = functools.partial(reference_product, dtype=torch.float32)
"""`reference_product` in float32, for schemes that no integer arithmetic computes too."""


def integer_product(
    x: Float[Tensor, "M K"], inputs: Grid | None, scales: Scales | None, weights: Operands
) -> Float[Tensor, "M N"]:
    """Return x̂ Ŵᵀ = s_x s_w (q_x q_wᵀ − z_w Σ q_x) by exact int32 sums of products of the codes q,
    with scales s and zero points z.

    Where inputs are not quantized (`inputs` or `scales` is None), return x Ŵᵀ.
    """
    if inputs is None or scales is None:
        if weights.grid.group:  # terms of one sum have different scales
            return reference_product(x, None, None, weights)
        return _weight_only_product(x, weights)
    q, zero = inputs.quantize(x, scales), weights.scales.zero
    sums = integer_matmul(q, weights.integers)
    if zero is not None:
        # In 64 bits: weights of a narrow range far from zero have a large zero point.
        sums = sums.long() - q.sum(1, keepdim=True, dtype=torch.int64) * zero.T.long()
    return (sums.double() * scales.scale * weights.scales.scale.T).float()


def _weight_only_product(x: Float[Tensor, "M K"], weights: Operands) -> Float[Tensor, "M N"]:
    """Return x Ŵᵀ as s_w (x (q_w − z_w)ᵀ), for weights without groups.

    Scaling the product takes one pass over memory less than scaling the weights.
    """
    scale, zero = weights.scales.expand(weights.width)
    if weights.packed:
        # Reorder the columns of x as the packed halves are: even columns first, then odd ones. An
        # odd width has a half without a column.
        x = torch.cat((x[:, ::2], F.pad(x[:, 1::2], (0, weights.width % 2))), dim=1)
        halves = torch.cat((weights.stored & 15, weights.stored >> 4), dim=1)
        halves.bitwise_xor_(8)  # from two's complement to q + 8
        numbers = halves.to(x.dtype).sub_(8 if zero is None else zero + 8)
    else:
        numbers = weights.grid.decode(weights.stored, x.dtype)
        if zero is not None:
            numbers = numbers.sub_(zero)
    return F.linear(x, numbers) * scale.T


def integer_matmul(a: Int8[Tensor, "M K"], b: Int8[Tensor, "N K"]) -> Int[Tensor, "M N"]:
    """Return a bᵀ exactly, in int32."""
    if a.device.type == "cpu" and _has_exact_int8_kernel():
        if a.shape[1] == 1:  # torch 2.13 gives wrong numbers for a single column
            a, b = F.pad(a, (0, 1)), F.pad(b, (0, 1))
        return torch._int_mm(a, b.T)
    return _float_matmul(a, b)  # exact on every device


def _float_matmul(a: Int8[Tensor, "M K"], b: Int8[Tensor, "N K"]) -> Int[Tensor, "M N"]:
    """Return a bᵀ by float32 products of blocks of columns, small enough for exact sums."""
    total = a.new_zeros((a.shape[0], b.shape[0]), dtype=torch.int32)
    a_blocks, b_blocks = (x.split(_MAX_EXACT_COLUMNS, dim=1) for x in (a, b))
    for a_block, b_block in zip(a_blocks, b_blocks, strict=True):
        total += (a_block.float() @ b_block.float().T).int()
    return total


@functools.cache
def _has_exact_int8_kernel() -> bool:
    """Tell whether this CPU's int8 matrix product is exact and faster than float32.

    Without VNNI `torch._int_mm` is a plain loop, 30 times slower than float32's product on AVX2, or
    adds pairs of products in 16 bits, which overflows at 127².
    """
    if not torch.cpu._is_vnni_supported():
        return False
    a = torch.full((32, 64), 127, dtype=torch.int8)  # the products that overflow first
    signs = torch.where(torch.arange(32) % 2 == 0, 1, -1).to(torch.int8).unsqueeze(1)
    b = a * signs
    return torch.equal(torch._int_mm(a, b.T), _float_matmul(a, b))


def pack_int4(q: Tensor) -> Tensor:
    """Return 4-bit whole numbers, (N, K) int8 from −8 to 7, packed two to a byte: (N, ⌈K/2⌉) uint8.

    Even columns are the low halves of the bytes; an odd K is padded with a zero.
    """
    if q.shape[1] % 2:
        q = F.pad(q, (0, 1))
    halves = (q & 15).to(torch.uint8)
    return halves[:, ::2] | (halves[:, 1::2] << 4)


def unpack_int4(packed: Tensor, width: int) -> Tensor:
    """Return the (N, `width`) int8 numbers that `pack_int4` packed into bytes."""
    halves = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1)[:, :width]
    return (halves ^ 8).to(torch.int8) - 8  # two's complement: 8 to 15 stand for −8 to −1
