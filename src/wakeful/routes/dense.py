"""Dense value residuals: every earlier layer's values."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.routes.base import QKV, Memory, Read, ValueRoute
from wakeful.shape import Shape


class Dense(ValueRoute):
    """V'_n = Σ_{m≤n} λ_{n,m} V_m, learned (Value Residual Learning, eq. 5 generalised, fig. 9).

    With `learned=False` the weights stay at eq. 5's 1/n. Learned weights start there too, or at
    the vanilla point λ_{n,n} = 1, λ_{n,m<n} = 0 with `vanilla_start=True`.
    """

    examples = ("dense", "dense(learned=False)")
    neutral = "dense(vanilla_start=True)"
    mixes = frozenset({"value"})

    def __init__(self, *, learned: bool = True, vanilla_start: bool = False) -> None:
        super().__init__()
        if vanilla_start and not learned:
            raise WakefulError("dense: vanilla_start with learned=False would be the plain model")
        self.learned = learned
        self.vanilla_start = vanilla_start

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        super().attach(shape, [layer for layer in layers if layer > 0])
        self.weights = nn.ParameterDict()
        for layer in self.layers if self.learned else ():
            start = torch.full((layer + 1,), 1.0 / (layer + 1))
            if self.vanilla_start:
                start = nn.functional.one_hot(torch.tensor(layer), layer + 1).float()
            self.weights[str(layer)] = nn.Parameter(start)

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset(Read("value", earlier) for earlier in range(layer))

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        values = [memory[Read("value", earlier)] for earlier in range(layer)] + [qkv.v]
        if not self.learned:
            return qkv._replace(v=sum(values[1:], start=values[0]) / len(values))
        weights = self.weights[str(layer)].to(qkv.v.dtype).unbind()
        terms = [weight * value for weight, value in zip(weights, values, strict=True)]
        return qkv._replace(v=sum(terms[1:], start=terms[0]))
