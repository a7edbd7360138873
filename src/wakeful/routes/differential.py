"""The Differential Transformer's attention: one softmax less a share of another."""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.routes.base import Attend, Basis, Memory, ValueRoute
from wakeful.variants.shape import Shape

_EPS = 1e-5
"""ε of the norm of a head's output, as the authors set it."""


class Differential(ValueRoute):
    """U = (1 − λ_0) RMSNorm((A_1 − λ A_2) V) for each pair of heads (2410.05258, eqs. 1 to 3).

    λ = e^{λ_q1 · λ_k1} − e^{λ_q2 · λ_k2} + λ_0 with four learned vectors (d) a layer, drawn with
    deviation 0.1, and λ_0 = 0.8 − 0.6 e^{−0.3 (n − 1)} in layer n from 1. Heads are those of the
    plain model, taken in pairs: key/value heads 2p and 2p + 1, and the query heads that they serve,
    make the two A, and both values together are the pair's V (2d channels). RMSNorm is over those,
    with one learned scale (2d) a layer.

    Each head attends over twice its channels, so attention costs twice what it did; what looks at
    attention sees each A as it is before the subtraction.
    """

    examples = ("differential",)
    by_layer = True

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        """Create for each layer the four vectors that make λ, and the norm's scale.

        Raises:
            WakefulError: the key/value heads cannot be paired: their number is odd.
        """
        super().attach(shape, layers)
        if shape.num_kv_heads % 2:
            raise WakefulError(
                "model.route = differential takes key/value heads in pairs: model.num_kv_heads "
                f"must be even, got {shape.num_kv_heads}"
            )
        vectors = torch.empty(len(self.layers), 4, shape.head_width)
        self.vectors = nn.Parameter(nn.init.normal_(vectors, std=0.1))
        self.scales = nn.Parameter(torch.ones(len(self.layers), 2 * shape.head_width))

    def single_channels(self) -> Mapping[Basis, str]:
        return {"values": "has a scale for each of"}

    def take_over(self, reference: ValueRoute, sources: Sequence[int]) -> None:
        """Copy the trained parameters of `reference`, where layer n was layer `sources[n]`, or none
        if that is −1.

        Raises:
            WakefulError: a layer had another number in the reference: the constant λ_0 depends on
                it.
        """
        for layer in self.layers:
            if sources[layer] in reference.layers and sources[layer] != layer:
                raise WakefulError(
                    f"{self} has constants by the layer's number: layer {layer} cannot inherit "
                    f"what layer {sources[layer]} has learned"
                )
        super().take_over(reference, sources)

    def attend(
        self, layer: int, attend: Attend, q: Tensor, keys: Tensor, values: Tensor, memory: Memory
    ) -> Tensor:
        """Return (1 − λ_0) RMSNorm((A_1 − λ A_2) V) as heads (B, L, H, d), with the layer's learned
        λ and its constant λ_0.

        Key/value heads 2p and 2p + 1, with their query heads, are a pair: their attention weights
        are A_1 and A_2, and the values of both side by side are V, of 2d channels.
        """
        width, pairs = q.shape[-1], values.shape[2] // 2
        # Each head gets the values of both heads of its pair. Zeros make queries and keys as wide,
        # which some kernels require; so one call of any kernel gives A_1 V and A_2 V.
        pair_values = values.unflatten(2, (pairs, 2)).flatten(3).repeat_interleave(2, dim=2)
        u = attend(F.pad(q, (0, width)), F.pad(keys, (0, width)), pair_values)
        first, second = u.unflatten(2, (pairs, 2, -1)).unbind(3)  # (B, L, pairs, H / G, 2d)
        lam, lam_0 = self._lambdas(layer)
        scale = self.scales[self.row_of[layer]] * (1 - lam_0)  # includes 1 − λ_0
        difference = first - lam.to(u.dtype) * second
        normed = F.rms_norm(difference, scale.shape, scale.to(u.dtype), _EPS).to(u.dtype)
        # Each half of the 2d channels is a head again: it is put where the plain model has a head
        # with the same values.
        return normed.unflatten(-1, (2, width)).transpose(3, 4).flatten(2, 4)

    def heads_per_value(self, layer: int) -> int:
        return 2

    def _lambdas(self, layer: int) -> tuple[Tensor, float]:
        """Return a layer's λ = e^{λ_q1 · λ_k1} − e^{λ_q2 · λ_k2} + λ_0 and its constant λ_0."""
        lam_0 = 0.8 - 0.6 * math.exp(-0.3 * layer)  # the paper counts layers from 1
        query_1, key_1, query_2, key_2 = self.vectors[self.row_of[layer]].unbind()
        return (query_1 @ key_1).exp() - (query_2 @ key_2).exp() + lam_0, lam_0
