"""AutoRound: whether each weight is rounded up or down, learned by what a block puts out."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.quant.schemes.grids import Grid, Scales
from wakeful.quant.schemes.methods import Method, Weighting


class AutoRound(Method):
    """AutoRound (2309.05516, section 3): signed gradients of a block's output error choose which
    way weights are rounded and how far their ranges go.

    Ŵ = (q − z)·s with q = clip(round(W / s + V) + z), V from −½ to ½, s and z of the range from
    β·min W to α·max W, α and β from 0 to 1 a group. Rounding passes gradients on as they come, and
    each of `steps` steps moves V, α and β by the sign of theirs, by 1/`steps` at first and by
    nothing at last. Blocks go in order and read what the quantized ones before them give; each is
    fitted to what it gives in full precision, on `batch` sequences a step, and the step whose error
    was least is kept. α and β of a format whose scales are rounded themselves stay 1.

    With `weighting` "loss" an error counts by the square of the loss's gradient in the token's
    state (`wakeful.quant.weighing`), so that the few tokens with massive activations do not lead
    it; with "none" all count alike, as in the paper.
    """

    examples = ("autoround(steps=2, batch=1)", "autoround(steps=2, batch=2, weighting='none')")
    fits_blocks = True
    steps: int = 200
    batch: int = 8
    weighting: Weighting = "loss"

    def __post_init__(self) -> None:
        if self.steps < 1 or self.batch < 1:
            raise WakefulError(
                f"autoround: steps and batch must be 1 or more, got {self.steps} and {self.batch}"
            )

    def passes(self, sequences: int) -> float:
        return super().passes(sequences) + 3 * self.steps * min(self.batch, sequences) / sequences


class Rounding:
    """A matrix W (N, K) on its way to a grid: the V, α and β that are learned."""

    def __init__(self, weight: Float[Tensor, "N K"], grid: Grid) -> None:
        self.weight, self.grid = weight.detach().float(), grid
        self.smallest, self.largest = grid.bounds(self.weight)
        self.offset = torch.zeros_like(self.weight, requires_grad=True)
        ranged = grid.scale_type == torch.float32  # a scale that is rounded itself is kept
        self.kept = None if ranged else grid.scales_of(self.weight)
        self.below = torch.ones_like(self.smallest, requires_grad=ranged)
        self.above = torch.ones_like(self.largest, requires_grad=ranged)

    @property
    def learned(self) -> list[Tensor]:
        """V, and β and α where the scales follow them."""
        return [each for each in (self.offset, self.below, self.above) if each.requires_grad]

    @property
    def scales(self) -> Scales:
        """s and z of the range as it is now."""
        if self.kept is not None:
            return self.kept
        return self.grid.scales_between(self.smallest * self.below, self.largest * self.above)

    def laid(self) -> Float[Tensor, "N K"]:
        """Return Ŵ, with gradients to V, α and β as if rounding were not there."""
        scales, width = self.scales, self.weight.shape[1]
        step, zero = scales.over(width)
        exact = self.weight / step + self.offset
        codes = self.grid.levels((self.weight + self.offset * step).detach(), scales)
        low, high = self.grid.low - 0.5, self.grid.high + 0.5  # what is past them is clipped
        if zero is None:
            return (codes + torch.where((exact > low) & (exact < high), _slope(exact), 0.0)) * step
        # z follows the range, and a clipped number follows z; within the range it cancels.
        exact_zero = -self.smallest * self.below / scales.scale
        exact_zero = Scales(exact_zero, group=scales.group).over(width)[0]
        inside = (exact + zero > low) & (exact + zero < high)
        slope = torch.where(inside, _slope(exact), -_slope(exact_zero))
        return (codes - zero + slope) * step

    @torch.no_grad()
    def move(self, gradients: Sequence[Tensor], by: float) -> None:
        """Take a step of that size against the signs of the gradients of what is learned."""
        for value, gradient in zip(self.learned, gradients, strict=True):
            low = -0.5 if value is self.offset else 0.0
            value.sub_(by * gradient.sign()).clamp_(low, low + 1)

    @torch.no_grad()
    def rounded(self) -> tuple[Tensor, Scales]:
        """Return the codes and their scales."""
        scales = self.scales
        step, _ = scales.over(self.weight.shape[1])
        return self.grid.quantize(self.weight + self.offset * step, scales), scales


def _slope(x: Tensor) -> Tensor:
    """Return zero, with the gradient of x."""
    return x - x.detach()
