"""RMSNorms of single heads: of a head's output, and of its values."""

from collections.abc import Iterable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.routes.base import QKV, Basis, Memory, ValueRoute
from wakeful.variants.shape import Shape

_EPS = 1e-6


class HeadNorm(ValueRoute):
    """û = u / RMS(u) ⊙ λ of each head's output before W_o, λ (d,) shared by a layer's heads.

    Head-wise RMSNorm of The Structural Origin of Attention Sink (Li et al. 2026, arXiv 2605.06611,
    section 5.1): all tokens' aggregated values have one size, the first token's too, which are a
    mean over nothing but its own. λ starts at 1. With `scale=False` there is no λ, as in Muse Spark
    (Transformers' `MuseSparkTextAttention.o_norm`), which gates the norm's output:
    `then(head_norm(scale=False), output_gate(per="channel"))`.
    """

    name = "head_norm"
    examples = ("head_norm", "head_norm(scale=False)")
    by_layer = True

    def __init__(self, *, scale: bool = True) -> None:
        super().__init__()
        self.scale = scale

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        """Create λ = 1 for each layer, if there is one."""
        super().attach(shape, layers)
        with_scale = self.layers if self.scale else ()
        self.scales = nn.ParameterDict(
            {str(layer): nn.Parameter(torch.ones(shape.head_width)) for layer in with_scale}
        )

    def single_channels(self) -> Mapping[Basis, str]:
        return {"values": "has a scale for each of"} if self.scale else {}

    def correct(self, layer: int, x: Tensor, u: Tensor, v: Tensor, memory: Memory) -> Tensor:
        scale = self.scales[str(layer)].to(u.dtype) if self.scale else None
        return F.rms_norm(u, u.shape[-1:], scale, _EPS)


class ValueNorm(ValueRoute):
    """V'_n = V_n / RMS(V_n) head by head: no value is smaller than another.

    As in Gemma 4 and Inkling 2 (Transformers' `Gemma4TextAttention.v_norm`,
    `Inkling2SlidingAttention.v_norm`), without a scale.
    """

    name = "value_norm"
    examples = ("value_norm",)
    mixes = frozenset({"value"})

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        return qkv._replace(v=F.rms_norm(qkv.v, qkv.v.shape[-1:], eps=_EPS))
