"""Three ways to compute one quantized linear layer; all agree to the rounding of float32.

Shapes: M tokens, K input channels, N output channels. `reference` is the definition: numbers that
lie on their grids, and their product. `integer` multiplies the int8 numbers and adds them up in
int32, which is exact. `torchao` hands the same integers to torchao's kernels.

Where inputs are quantized, the product is scaled in float64 and rounded to float32 once. In float32
the three would differ in the last bit, which sooner or later puts an activation of a later layer on
the other side of a rounding, and after a few layers two right answers are as far from each other as
either is from the full-precision model.
"""

import functools
import math
import threading
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, Int8
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.paged import AT_ONCE
from wakeful.quantization.schemes import Grid, Scales

Arithmetic = Literal["reference", "integer", "torchao"]
_EXACT_COLUMNS = 2**10
"""Products of int8 numbers are 2¹⁴ at most; float32 adds integers up to 2²⁴ exactly."""
_OF_BYTES = {4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""A type of so many bytes, to move two numbers as one."""
INSTALL_TORCHAO = "pip install 'wakeful[torchao]'"


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
        return (
            reference_product(x, None, None, weights)
            if weights.grid.group
            else _weight_only(x, weights)
        )
    q, zero = inputs.quantize(x, scales), weights.scales.zero
    sums = integer_matmul(q, weights.integers)
    if zero is not None:
        # A narrow range far from zero has a zero point that 32 bits would not carry.
        sums = sums.long() - q.sum(1, keepdim=True, dtype=torch.int64) * zero.T.long()
    return (sums.double() * scales.scale * weights.scales.scale.T).float()


def torchao(
    x: Float[Tensor, "M K"], inputs: Grid | None, scales: Scales | None, weights: Operands
) -> Float[Tensor, "M N"]:
    """Return the same from torchao: its scaled int8 product, or its weight-only int tensors.

    torchao's own symmetric int8 spans −128 to 127, so its quantization is not From Attention to
    Activation's: the numbers and scales are ours, and only the arithmetic is torchao's.
    """
    scaled_matmul, weight_only = torchao_kernels()
    scale, zero = weights.scales.scale, weights.scales.zero
    if inputs is None or scales is None:
        matrix = weight_only(
            qdata=weights.integers,
            scale=scale,
            zero_point=torch.zeros_like(scale) if zero is None else zero.float(),
            target_dtype=getattr(torch, f"int{weights.grid.bits}"),
            block_size=(weights.integers.shape[0] // scale.shape[0], weights.width),
            dtype=x.dtype,
            activation_quantization=None,
        )
        return F.linear(x, matrix)
    # One scale for all rows may stay a single number.
    rows = scales.scale.double().contiguous()
    return (scaled_matmul(inputs.quantize(x, scales), weights.integers.T, rows) * scale.T).float()


LINEARS = {"reference": reference_product, "integer": integer, "torchao": torchao}


def _weight_only(x: Tensor, weights: Operands) -> Tensor:
    """Return s_w (x (q_w − z_w)ᵀ): scaling the product takes one pass less than the weights."""
    stored, zero = weights.stored, 0 if weights.scales.zero is None else weights.scales.zero
    if weights.packed:
        # The order of columns changes no sum, so x is put into that of the halves.
        x = torch.cat((x[:, ::2], F.pad(x[:, 1::2], (0, weights.width % 2))), dim=1)
        halves = scratch((stored.shape[0], 2, stored.shape[1]), torch.uint8, x)
        stored = unpack_halves(stored, halves).flatten(1)
        zero = zero + 8
    numbers = scratch(tuple(stored.shape), x.dtype, x).copy_(stored).sub_(zero)
    return F.linear(x, numbers) * weights.scales.scale.T


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


@functools.cache
def torchao_kernels() -> tuple[Any, Any]:
    """Return torchao's scaled int8 product and its weight-only tensor, or say how to install it."""
    try:
        from torchao.kernel.intmm import int_scaled_matmul  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
        from torchao.quantization import IntxUnpackedToInt8Tensor  # noqa: PLC0415  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise WakefulError(
            f"torchao cannot be used ({str(error).splitlines()[0]}); install it with "
            f"{INSTALL_TORCHAO}, or leave the arithmetic at reference or integer"
        ) from None
    return int_scaled_matmul, IntxUnpackedToInt8Tensor


_buffers = threading.local()
"""A buffer of each dtype for each thread, as large as the largest that was asked for: on a
processor, mapping fresh memory for a layer's weights in float32 takes several times as long as
filling it."""


def scratch(shape: tuple[int, ...], dtype: torch.dtype, x: Tensor) -> Tensor:
    """Return memory to fill for a product with `x`; it is valid until this thread asks again.

    It is fresh where it must outlive that: where a gradient will be asked for or the call is being
    traced; and on a GPU, whose allocator keeps memory itself.
    """
    traced = type(x) is not Tensor or torch.compiler.is_compiling()
    if traced or x.device.type != "cpu" or (x.requires_grad and torch.is_grad_enabled()):
        return torch.empty(shape, dtype=dtype, device=x.device)
    size = math.prod(shape)
    buffer: Tensor | None = vars(_buffers).get(str(dtype))
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):  # outside it too, the buffer must be writable
            buffer = vars(_buffers)[str(dtype)] = torch.empty(size, dtype=dtype)
    return buffer[:size].view(shape)


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
