"""NeuTRENO: a pull towards the first layer's values after attention."""

from collections.abc import Iterable

from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.routes.base import FIRST_VALUE, Memory, Read, Source, ValueRoute
from wakeful.shape import Shape


class NeuTRENO(ValueRoute):
    """U_n = A_n V_n + λ (V_1 − V_n), before the output projection (eq. 8; J is the identity).

    λ = 0.4 alone; with ResFormer λ = 0.2, where V_n is the value already mixed: put it after
    ResFormer in `then`. With fewer key/value heads than query heads (GQA) the difference is
    repeated to the query heads.
    """

    examples = ("neutreno",)
    neutral = "neutreno(lam=0.0)"

    def __init__(self, *, lam: float = 0.4) -> None:
        super().__init__()
        self.lam = lam

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        super().attach(shape, [layer for layer in layers if layer > 0])
        self.repeats = shape.num_heads // shape.num_kv_heads

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset({FIRST_VALUE})

    def correct(self, layer: int, x: Tensor, u: Tensor, v: Tensor, memory: Memory) -> Tensor:
        difference = memory[FIRST_VALUE] - v
        return u + self.lam * difference.repeat_interleave(self.repeats, dim=2)

    def check(self, layer: int, sources: list[Source]) -> None:
        if sources[layer].value == 0:
            raise WakefulError(
                f"neutreno would add nothing at layer {layer}: that layer uses the first layer's "
                "values, so V_1 − V_n is zero"
            )
