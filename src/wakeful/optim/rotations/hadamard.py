"""Random signs, then a fast Walsh–Hadamard transform: near Haar's cure at O(n log n) a row.

Any width will do: with n = 2ᵏ m and m odd the transform is F = H_{2ᵏ} ⊗ C_m, where C_m is the
discrete Hartley transform, C_ij = (cos(2πij/m) + sin(2πij/m)) / √m. C_m is symmetric and orthogonal
for every m, and has no zero entry for odd m (a zero needs ij/m = 3/8 modulo 1/2), so F is exactly
orthogonal on Rⁿ, mixes every coordinate with every other in one pass, and F F = I. Padding would
leave Rⁿ, and diagonal blocks would keep coordinates apart. With m = 1 F is Walsh–Hadamard.

F is applied as a few small matrix products, one for each Kronecker factor: on a CPU a factor of
16 costs 0.4 ns an element and one of 32 0.8 ns, a dense 512 × 512 product 9 ns.
"""

import functools
import math

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.optim.rotations.base import Rotation, random_signs

LARGEST_DENSE = 512  # an odd factor wider than this goes through the FFT
TAIL = 16  # the innermost factor: the fastest matrix product an element
LARGEST_FACTOR = 40  # a wider one is split: 8 · 8 takes two thirds of the time of 64


class Hadamard(Rotation):
    """Q = F S: random signs S, then F, Walsh–Hadamard (⊗ Hartley where n has an odd factor).

    Holds n signs a weight; the factors of F are shared by all weights of that width.
    """

    examples = ("hadamard",)

    def draw(
        self, width: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.signs = random_signs(width, generator).to(device, dtype)
        self.factors = transform_factors(width, device, dtype)

    def into(self, grad: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return transform(grad * self.signs, self.factors)

    def back(self, step: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return transform(step, self.factors).mul_(self.signs)

    def memory(self, width: int, itemsize: int) -> int:
        return width * itemsize


def transform(
    rows: Float[Tensor, "R n"], factors: tuple[Tensor | int, ...]
) -> Float[Tensor, "R n"]:
    """Return F x on the last axis, F the Kronecker product of `factors`.

    An int stands for the Hartley transform of that width by FFT. F is symmetric and its own
    inverse.
    """
    before, width = rows.shape
    after = width
    for factor in factors:
        size = factor if isinstance(factor, int) else factor.shape[0]
        after //= size
        if isinstance(factor, int):
            spectrum = torch.fft.fft(rows.reshape(before, size, after), dim=1, norm="ortho")
            mixed = spectrum.real - spectrum.imag
        elif after == 1:
            mixed = rows.reshape(before, size) @ factor
        else:
            mixed = torch.bmm(factor.expand(before, size, size), rows.reshape(before, size, after))
        rows, before = mixed, before * size
    return rows.reshape(-1, width)


@functools.cache
@torch.inference_mode(False)  # they are kept, and autograd refuses tensors made in that mode
def transform_factors(
    width: int, device: torch.device, dtype: torch.dtype
) -> tuple[Tensor | int, ...]:
    """Return the Kronecker factors of F, outermost first; each is symmetric and orthogonal."""
    odd = width // (width & -width)
    power = width // odd
    if odd > LARGEST_DENSE:
        rest = transform_factors(power, device, dtype) if power > 1 else ()
        return (odd, *rest)
    if width <= LARGEST_FACTOR or power < TAIL:
        if width <= LARGEST_DENSE:
            return (_factor(odd, power, device, dtype),)
        return (_factor(odd, 1, device, dtype), _factor(1, power, device, dtype))
    head = power // TAIL
    bits = head.bit_length() - 1
    sizes: list[tuple[int, int]] = []
    if odd * head <= LARGEST_FACTOR or bits < 3:
        sizes.append((odd, head))
    else:
        if odd > 1:
            sizes.append((odd, 1))
        pieces = -(-bits // 5)
        sizes += [(1, 2 ** (bits // pieces + (i < bits % pieces))) for i in range(pieces)]
    return tuple(_factor(m, p, device, dtype) for m, p in (*sizes, (1, TAIL)) if m * p > 1)


def _factor(odd: int, power: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return C_odd ⊗ H_power, normalized, computed in float64 and rounded once."""
    exact = {"dtype": torch.float64, "device": "cpu"}  # whatever the default device is
    hadamard = torch.ones(1, 1, **exact)
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]], **exact)
    while hadamard.shape[0] < power:
        hadamard = torch.kron(hadamard, pair)
    index = torch.arange(odd, **exact)
    angle = 2 * math.pi * torch.outer(index, index).remainder(odd) / odd
    hartley = angle.cos() + angle.sin()
    return (torch.kron(hartley, hadamard) / math.sqrt(odd * power)).to(device, dtype)
