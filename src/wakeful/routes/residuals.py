"""Residual connections of values: what later layers add of earlier layers' values to their own."""

from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.routes.base import FIRST_VALUE, QKV, Memory, Read, Source, ValueRoute
from wakeful.variants.shape import Shape

Mode = Literal["identity", "constant", "learnable", "plus"]


class ResFormer(ValueRoute):
    """`V'_n = λ_{n,1} V_1 + λ_{n,2} V_n` for n ≥ 2 (Value Residual Learning, eq. 7 and fig. 6).

    The weights by `mode`:

    * `identity`: ½ and ½ (eq. 7).
    * `constant`: `scale` and 1 (fig. 6, best at λ = 2).
    * `learnable`: two scalars a layer, started at `init = (λ_{n,1}, λ_{n,2})`.
    * `plus`: `λ_{n,1} = λ_s · softmax(λ')_n` over the route's layers, `λ_{n,2} = ½`, with λ_s
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
    from_second = True
    by_layer = True

    def __init__(
        self,
        *,
        mode: Mode = "identity",
        scale: float = 2.0,
        init: tuple[float, float] = (0.5, 0.5),
    ) -> None:
        """Store the options.

        Raises:
            WakefulError: an option is set that `mode` does not use.
        """
        super().__init__()
        if scale != 2.0 and mode != "constant":
            raise WakefulError(f'resformer: scale is used by mode="constant" only, not {mode!r}')
        if tuple(init) != (0.5, 0.5) and mode != "learnable":
            raise WakefulError(f'resformer: init is used by mode="learnable" only, not {mode!r}')
        self.mode: Mode = mode
        self.scale = scale
        self.init = (float(init[0]), float(init[1]))

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        """Create the weights, if the mode has any.

        In "learnable" each layer has two, of V_1 and of its own values. In "plus" V_1 has the
        weight λ_s · softmax(λ')_n: λ_s is `total`, and λ' is `share`, with a number for each layer.
        """
        super().attach(shape, layers)
        if self.mode == "learnable":
            self.weights = nn.Parameter(torch.tensor([self.init] * len(self.layers)))
        elif self.mode == "plus":
            self.total = nn.Parameter(torch.tensor([float(shape.num_layers)]))
            self.share = nn.Parameter(torch.zeros(len(self.layers)))

    @torch.no_grad()
    def start_plain(self) -> str:
        """Set learnable weights to 0 for V_1 and 1 for the layer's own values, and return "".

        In other modes set nothing, and return a sentence on what the route changes.
        """
        if self.mode != "learnable":
            return super().start_plain()
        if self.layers:  # without layers `weights` is empty and has no columns to fill
            self.weights.copy_(torch.tensor([0.0, 1.0]))
        return ""

    @torch.no_grad()
    def take_over(self, reference: ValueRoute, sources: Sequence[int]) -> None:
        """Copy the weights of each layer n from layer `sources[n]` of the reference.

        In mode "plus" the weight of V_1 is λ_s · softmax(λ')_n. Here λ_s, which all layers share,
        is scaled so that this product is what it was in the reference.

        Raises:
            WakefulError: in mode "plus" a layer comes from a layer that has no λ' there.
        """
        if self.mode != "plus":
            super().take_over(reference, sources)
            return
        assert isinstance(reference, ResFormer)
        if any(sources[layer] not in reference.layers for layer in self.layers):
            raise WakefulError(
                f"{self} shares one total among its layers, and one of them would come from a "
                "layer that has no share in the reference; inherit with another route"
            )
        # A softmax over the inherited layers alone gives each its old share divided by the sum of
        # their old shares: λ_s is multiplied by that sum.
        rows = [reference.row_of[sources[layer]] for layer in self.layers]
        sum_of_shares = reference.share.softmax(0)[rows].sum()
        self.total.copy_(reference.total * sum_of_shares)
        self.share.copy_(reference.share[rows])

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset({FIRST_VALUE})

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        """Return the heads with the values λ_{n,1} V_1 + λ_{n,2} V_n, where V_1 are the first
        layer's values, V_n this layer's, and the mode gives the weights.
        """
        first = memory[FIRST_VALUE]
        if self.mode == "identity":
            return qkv._replace(v=torch.lerp(qkv.v, first, 0.5))
        if self.mode == "constant":
            return qkv._replace(v=torch.add(qkv.v, first, alpha=self.scale))
        row = self.row_of[layer]
        if self.mode == "learnable":
            weight_first, weight_own = self.weights[row].to(first.dtype).unbind()
        else:
            weight_first = (self.total * self.share.softmax(0)[row]).to(first.dtype)
            weight_own = 0.5
        return qkv._replace(v=weight_first * first + weight_own * qkv.v)


class NeuTRENO(ValueRoute):
    """U_n = A_n V_n + λ (V_1 − V_n), before the output projection (eq. 8; J is the identity).

    λ = 0.4 alone; with ResFormer λ = 0.2, where V_n is the value already mixed: put it after
    ResFormer in `then`. With fewer key/value heads than query heads (GQA) the difference is
    repeated to the query heads.
    """

    examples = ("neutreno",)
    neutral = "neutreno(lam=0.0)"
    from_second = True

    def __init__(self, *, lam: float = 0.4) -> None:
        super().__init__()
        self.lam = lam

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset({FIRST_VALUE})

    def correct(self, layer: int, x: Tensor, u: Tensor, v: Tensor, memory: Memory) -> Tensor:
        difference = memory[FIRST_VALUE] - v
        return u + self.lam * difference.repeat_interleave(u.shape[2] // v.shape[2], dim=2)

    def check(self, layer: int, sources: list[Source]) -> None:
        """Raise `WakefulError` if the layer uses the first layer's values: V_1 − V_n would be 0."""
        if sources[layer].value == 0:
            raise WakefulError(
                f"neutreno would add nothing at layer {layer}: that layer uses the first layer's "
                "values, so V_1 − V_n is zero"
            )
