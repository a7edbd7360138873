"""Dense value residuals: every earlier layer's values."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.routes.base import QKV, Memory, Read, ValueRoute
from wakeful.shape import Shape


class Dense(ValueRoute):
    """V'_n = Σ_{m≤n} λ_{n,m} V_m, learned (Value Residual Learning, eq. 5 generalized, fig. 9).

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

    @torch.no_grad()
    def start_plain(self) -> str:
        if not self.learned:
            return super().start_plain()
        for layer in self.layers:
            self.weights[str(layer)].zero_()[layer] = 1.0
        return ""

    @torch.no_grad()
    def take_over(self, reference: ValueRoute, sources: Sequence[int]) -> None:
        assert isinstance(reference, Dense)
        if not self.learned:
            return
        inherited = [source for source in sources if source >= 0]
        if inherited != sorted(set(inherited)):
            raise WakefulError(
                f"{self} weighs the layers before each: its blocks must be inherited in their "
                f"order and once each, not as {list(sources)}"
            )
        for layer in self.layers:
            if str(sources[layer]) not in reference.weights:
                continue
            theirs = reference.weights[str(sources[layer])]
            for earlier, source in enumerate(sources[: layer + 1]):
                self.weights[str(layer)][earlier] = theirs[source] if source >= 0 else 0.0

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset(Read("value", earlier) for earlier in range(layer))

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        values = [memory[Read("value", earlier)] for earlier in range(layer)] + [qkv.v]
        if not self.learned:
            return qkv._replace(v=sum(values[1:], start=values[0]) / len(values))
        weights = self.weights[str(layer)].to(qkv.v.dtype).unbind()
        terms = [weight * value for weight, value in zip(weights, values, strict=True)]
        return qkv._replace(v=sum(terms[1:], start=terms[0]))
