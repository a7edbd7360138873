"""Losses that a learned rotation lowers: of what linear layers read, or of the model's predictions.

Shapes: B places, M rows of each (tokens, or output channels of weights), K input channels.
"""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.quant.schemes import Grid, Scales, parse_scheme
from wakeful.variants import Variant

UNIFORM = 1.8
"""The kurtosis of a uniform distribution."""


class Loss(Variant, ABC):
    """What is to be low in the rotated basis."""


class Local(Loss):
    """A loss of rows in the rotated basis: samples of what layers read, of root mean square 1 over
    the channels, and rows of the matrices that read it.
    """

    parts: tuple[str, ...] = ("inputs",)
    """Which of `inputs` and `weights` it looks at."""

    @abstractmethod
    def of(self, part: str, rows: Float[Tensor, "B M K"]) -> Float[Tensor, ""]:
        """Return the loss of one part's rows."""


class Whip(Local):
    """Mean over tokens of Σ_k exp(−|x_k|): what lies near zero is driven away from it, and what
    stands out must come down, since the norm stays (DartQuant, 2511.04063).
    """

    examples = ("whip",)

    def of(self, part: str, rows: Float[Tensor, "B M K"]) -> Float[Tensor, ""]:
        return rows.abs().neg().exp().sum(-1).mean()


class Kurtosis(Local):
    """Mean over tokens of |κ − 1.8|, κ = mean (x − μ)⁴ / (mean (x − μ)²)² over a token's channels,
    1.8 that of a uniform distribution (after KurTail, 2503.01483).
    """

    examples = ("kurtosis",)

    def of(self, part: str, rows: Float[Tensor, "B M K"]) -> Float[Tensor, ""]:
        square = (rows - rows.mean(-1, keepdim=True)).square()
        return (square.square().mean(-1) / square.mean(-1).square() - UNIFORM).abs().mean()


class Rounding(Local):
    """Mean over rows of ‖x − x̂‖² / ‖x‖², x̂ of x on a scheme's own grid: of its inputs, plus that of
    its weights. To first order the sum is the relative squared error of the layers' outputs.

    A scale per tensor is that of the sampled rows.
    """

    examples = ("rounding", "rounding(scheme='nvfp4')")

    def __init__(self, *, scheme: str = "w4a4") -> None:
        self.scheme = scheme
        made = parse_scheme(scheme)
        self._grids = {"inputs": made.inputs, "weights": made.weights}
        self.parts = tuple(part for part, grid in self._grids.items() if grid is not None)
        if not self.parts:
            raise WakefulError(
                f"rounding: scheme = {scheme!r} rounds neither inputs nor weights of linear layers"
            )

    def of(self, part: str, rows: Float[Tensor, "B M K"]) -> Float[Tensor, ""]:
        grid, rows = self._grids[part], rows.float()
        assert grid is not None
        parts = rows.unbind() if grid.per == "tensor" else (rows.flatten(0, 1),)
        near = torch.cat([straight(each, grid) for each in parts]).view(rows.shape)
        size = rows.square().sum(-1).clamp_min(torch.finfo(rows.dtype).tiny)
        return ((rows - near).square().sum(-1) / size).mean()


class NextToken(Loss):
    """The model's own next-token loss, its linear layers' inputs on a scheme's grid, its weights as
    they are (SpinQuant, 2405.16406): end to end, a forward and a backward pass a step.
    """

    name = "loss"
    examples = ("loss", "loss(scheme='nvfp4')")

    def __init__(self, *, scheme: str = "w4a4") -> None:
        self.scheme = scheme
        inputs = parse_scheme(scheme).inputs
        if inputs is None:
            raise WakefulError(f"loss: scheme = {scheme!r} does not round inputs")
        self.grid: Grid = inputs


def straight(x: Float[Tensor, "M K"], grid: Grid) -> Float[Tensor, "M K"]:
    """Return x̂ of x, float32, on a grid, with a gradient that rounding lets through.

    With the step s and the zero point z, x̂ = s (clip(x/s + z) + r − z), r what rounding adds, a
    constant to the gradient (Learned Step Size Quantization, 1902.08153). s grows with
    the range that it is fitted to, whose ends are numbers of x.
    """
    low, high = grid.bounds(x)
    size = torch.maximum(low.abs(), high.abs()) if grid.symmetric else high - low
    grows = 1 + (size - size.detach()) / size.detach().clamp_min(torch.finfo(size.dtype).tiny)
    with torch.no_grad():
        scales = grid.scales_of(x)
        levels = grid.levels(x, scales)
        step, zero = scales.over(x.shape[1])
    step = step * Scales(grows, group=grid.group).over(x.shape[1])[0]
    zero = 0 if zero is None else zero
    held = (x / step + zero).clamp(grid.low, grid.high)
    return step * (held + (levels - held).detach() - zero)
