"""ResFormer: a residual connection from the first layer's values to every later layer's."""

from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.routes.base import FIRST_VALUE, QKV, Memory, Read, ValueRoute
from wakeful.shape import Shape

Mode = Literal["identity", "constant", "learnable", "plus"]


class ResFormer(ValueRoute):
    """V'_n = λ_{n,1} V_1 + λ_{n,2} V_n for n ≥ 2 (Value Residual Learning, eq. 7 and fig. 6).

    The weights by `mode`:

    * `identity`: ½ and ½ (eq. 7).
    * `constant`: `scale` and 1 (fig. 6, best at λ = 2).
    * `learnable`: two scalars a layer, started at `init` = (λ_{n,1}, λ_{n,2}).
    * `plus`: λ_{n,1} = λ_s · softmax(λ')_n over the layers the route acts on, λ_{n,2} = ½, with λ_s
      started at the number of layers N and λ' at 0. The start of λ' is not stated by the authors;
      zero, an equal share for each layer, is our reading.

    V_n is the raw value projection, so RoPE never touches it; gradients flow through V_1. The
    mixing comes before the cache, which therefore holds V'_n and decoding needs no extra state.
    Sparse ResFormer is `on_layers(range(5, 8), resformer(mode="constant", scale=5.0))`.
    """

    examples = (
        "resformer",
        'resformer(mode="constant", scale=2.0)',
        'resformer(mode="learnable")',
        'resformer(mode="plus")',
    )
    neutral = 'resformer(mode="learnable", init=(0.0, 1.0))'
    mixes = frozenset({"value"})

    def __init__(
        self,
        *,
        mode: Mode = "identity",
        scale: float = 2.0,
        init: tuple[float, float] = (0.5, 0.5),
    ) -> None:
        super().__init__()
        if mode not in get_args(Mode):
            raise WakefulError(f"resformer: mode must be one of {get_args(Mode)}, got {mode!r}")
        if scale != 2.0 and mode != "constant":
            raise WakefulError(f'resformer: scale is used by mode="constant" only, not {mode!r}')
        if tuple(init) != (0.5, 0.5) and mode != "learnable":
            raise WakefulError(f'resformer: init is used by mode="learnable" only, not {mode!r}')
        if len(init) != 2:
            raise WakefulError(f"resformer: init is (weight of V_1, weight of V_n), got {init!r}")
        self.mode: Mode = mode
        self.scale = scale
        self.init = (float(init[0]), float(init[1]))

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        super().attach(shape, [layer for layer in layers if layer > 0])
        self._row = {layer: row for row, layer in enumerate(self.layers)}
        if self.mode == "learnable":
            self.weights = nn.Parameter(torch.tensor([self.init] * len(self.layers)))
        elif self.mode == "plus":
            self.total = nn.Parameter(torch.tensor([float(shape.num_layers)]))
            self.share = nn.Parameter(torch.zeros(len(self.layers)))

    @torch.no_grad()
    def start_plain(self) -> str:
        if self.mode != "learnable":
            return super().start_plain()
        if self.layers:
            self.weights.copy_(torch.tensor([0.0, 1.0]))
        return ""

    @torch.no_grad()
    def take_over(self, reference: ValueRoute, sources: Sequence[int]) -> None:
        assert isinstance(reference, ResFormer)
        rows = {
            self._row[layer]: reference._row[source]
            for layer, source in enumerate(sources)
            if layer in self._row and source in reference._row
        }
        if self.mode == "learnable":
            for row, theirs in rows.items():
                self.weights[row] = reference.weights[theirs].to(self.weights)
        elif self.mode == "plus":
            if len(rows) < len(self.layers):
                raise WakefulError(
                    f"{self} shares one total among its layers, and one of them would come from a "
                    "layer that has no share in the reference; inherit with another route"
                )
            # λ_s · softmax(λ')_n stays what it was for every layer that is kept.
            kept = [rows[row] for row in range(len(self.layers))]
            share = reference.share.softmax(0)[kept].sum()
            self.total.copy_(reference.total * share)
            self.share.copy_(reference.share[kept])

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset({FIRST_VALUE})

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        first = memory[FIRST_VALUE]
        if self.mode == "identity":
            return qkv._replace(v=torch.lerp(qkv.v, first, 0.5))
        if self.mode == "constant":
            return qkv._replace(v=torch.add(qkv.v, first, alpha=self.scale))
        row = self._row[layer]
        if self.mode == "learnable":
            weight_first, weight_own = self.weights[row].to(first.dtype).unbind()
        else:
            weight_first = (self.total * self.share.softmax(0)[row]).to(first.dtype)
            weight_own = 0.5
        return qkv._replace(v=weight_first * first + weight_own * qkv.v)
