"""AWQ: the division of inputs that costs a layer's output least, found by trying."""

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.quant.schemes.grids import Grid
from wakeful.quant.schemes.methods import Method, Seen, Weighting


class Awq(Method):
    """AWQ (2306.00978, equations 4 and 5): input channels are divided by s = mean|x|^α, and weights
    multiplied by it, with the α that gives the least error of the output.

    Of `points` α from 0 on and below 1 it is the one with the least ‖(Ŵ − W) X‖², Ŵ the rounded
    W diag(s) times diag(s)⁻¹, summed over the layers that read the same tensor and share s (the
    authors' code compares what all of attention or the feed-forward network puts out). s is first
    divided by √(max s · min s), as there. `norms` is as in `smooth`, `weighting` as in `gptq`.
    """

    examples = ("awq", "awq(points=10, norms=True)", "awq(weighting='none')")
    needs_products = True
    points: int = 20
    norms: bool = False
    weighting: Weighting = "loss"

    def __post_init__(self) -> None:
        if self.points < 1:
            raise WakefulError(f"awq: points must be 1 or more, got {self.points}")

    def divisor(self, seen: Seen, grid: Grid) -> Float[Tensor, "K"]:
        readers = seen.readers
        if readers.divisor is not None:
            return readers.divisor
        found: list[tuple[float, int, Tensor]] = []
        for number in range(self.points):
            s = _scales(seen.sums, number / self.points)
            errors = (_error(weight, s, grid, each.products) for weight, each in readers.layers)
            found.append((sum(errors), number, s))
        readers.divisor = min(found)[2]
        return readers.divisor


def _scales(sums: Float[Tensor, "K"], alpha: float) -> Float[Tensor, "K"]:
    """Return s of channels' mean sizes; one that is always zero stays."""
    s = torch.where(sums > 0, sums.float() ** alpha, torch.ones_like(sums))
    return s / (s.max() * s.min()).sqrt()


def _error(
    weight: Float[Tensor, "N K"],
    s: Float[Tensor, "K"],
    grid: Grid,
    products: Float[Tensor, "K K"] | None,
) -> float:
    """Return ‖(Ŵ − W) X‖² = tr((Ŵ − W) XᵀX (Ŵ − W)ᵀ)."""
    assert products is not None
    scaled = weight.float() * s
    error = (grid.fake_quantize(scaled, grid.scales_of(scaled)) - scaled) / s
    return float(((error @ products) * error).sum())
