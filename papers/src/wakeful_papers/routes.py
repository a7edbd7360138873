"""Value routes of the papers' figures and of the arena, for `model.route`, such as
`wakeful_papers.routes:XSA`.

The references of Value Residual Learning are written for comparison and not for speed.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.routes import QKV, Attend, Memory, Read, Source, ValueRoute
from wakeful.routes.base import Basis
from wakeful.variants.shape import Shape

FIRST_QUERY = Read("query", 0)
FIRST_KEYS = Read("keys", 0)
Other = Literal["previous", "first"]
_EPS = 1e-6
_NEARLY_PLAIN = -8.0
"""A θ of `ValueScale` at which C is 0.0003 of what it is at θ = 0."""


class _Residual(ValueRoute):
    from_second = True

    def __init__(self, *, weight: float = 0.5) -> None:
        super().__init__()
        self.weight = weight


class _Projection(_Residual):
    """X'_n = (1 − w) X_n + w X_m of the projections X that `mixes` names."""

    def earlier(self, layer: int) -> Read:
        """Return the tensor X_m, by default the first layer's."""
        (kind,) = self.mixes
        return Read(kind, 0)

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset({self.earlier(layer)})

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        """Mix this layer's projection with the earlier layer's."""
        earlier = self.earlier(layer)
        field = earlier.kind[0]  # "query", "key", "value" are q, k, v in `QKV`
        mixed = torch.lerp(getattr(qkv, field), memory[earlier], self.weight)
        return qkv._replace(**{field: mixed})


class QueryResidual(_Projection):
    """Q'_n = (1 − w) Q_n + w Q_1, w = ½ (Value Residual Learning, fig. 7: no gain).

    RoPE is linear and the same in every layer, so mixing rotated queries is mixing queries.
    """

    examples = ("wakeful_papers.routes:QueryResidual",)
    neutral = "wakeful_papers.routes:QueryResidual(weight=0.0)"
    mixes = frozenset({"query"})


class KeyResidual(_Projection):
    """K'_n = (1 − w) K_n + w K_1, w = ½: `QueryResidual` for keys."""

    examples = ("wakeful_papers.routes:KeyResidual",)
    neutral = "wakeful_papers.routes:KeyResidual(weight=0.0)"
    mixes = frozenset({"key"})


class PreviousValue(_Projection):
    """`V'_n = (1 − w) V_n + w V_{n−1}`, w = ½ (Value Residual Learning, fig. 9: worse than V_1)."""

    examples = ("wakeful_papers.routes:PreviousValue",)
    neutral = "wakeful_papers.routes:PreviousValue(weight=0.0)"
    mixes = frozenset({"value"})

    def earlier(self, layer: int) -> Read:
        return Read("value", layer - 1)


class AttentionResidual(_Residual):
    """U_n = ((1 − w) A_n + w A_1) V_n, w = ½ (Value Residual Learning, fig. 7: no gain).

    A_1 has the first layer's queries and keys; scale and sink are this layer's, which are the first
    layer's too unless sinks are learned or logits scaled by layer. It attends twice per layer.
    """

    examples = ("wakeful_papers.routes:AttentionResidual",)
    neutral = "wakeful_papers.routes:AttentionResidual(weight=0.0)"
    one_matrix = False

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset({FIRST_QUERY, FIRST_KEYS})

    def attend(
        self, layer: int, attend: Attend, q: Tensor, keys: Tensor, values: Tensor, memory: Memory
    ) -> Tensor:
        """Return the mean of two attention outputs over this layer's values, by A_1 and by A_n."""
        first = attend(memory[FIRST_QUERY], memory[FIRST_KEYS], values)
        return torch.lerp(attend(q, keys, values), first, self.weight)


class IdentityMapping(ValueRoute):
    """U_n = A_n V_n + mean_{i<n} V_i (Value Residual Learning, eq. 6; figs. 3, 8: poor).

    A reference: it shows that earlier values have to pass through the attention.
    """

    examples = ("wakeful_papers.routes:IdentityMapping",)
    from_second = True

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset(Read("value", earlier) for earlier in range(layer))

    def correct(self, layer: int, x: Tensor, u: Tensor, v: Tensor, memory: Memory) -> Tensor:
        earlier = [memory[Read("value", number)] for number in range(layer)]
        mean = torch.stack(earlier).mean(0)
        return u + mean.repeat_interleave(u.shape[2] // v.shape[2], dim=2)


class CrossLayer(ValueRoute):
    """U_n = softmax(Q_n [K_n; K_m]ᵀ / √d) [V_n; V_m] (Value Residual Learning, eq. 2).

    m is the previous layer (`other="previous"`, fig. 3) or the first (fig. 8). A reference, for
    whole texts without padding, at four times the attention's cost: the keys of both layers take
    turns, and every query comes twice, so that the causal mask of the second one ends at its own
    token in both.
    """

    examples = (
        "wakeful_papers.routes:CrossLayer",
        'wakeful_papers.routes:CrossLayer(other="first")',
    )
    from_second = True
    one_matrix = False

    def __init__(self, *, other: Other = "previous") -> None:
        super().__init__()
        self.other: Other = other

    def reads(self, layer: int) -> frozenset[Read]:
        source = self._source_layer(layer)
        return frozenset({Read("keys", source), Read("values", source)})

    def attend(
        self, layer: int, attend: Attend, q: Tensor, keys: Tensor, values: Tensor, memory: Memory
    ) -> Tensor:
        """Return attention over this layer's and layer m's keys and values."""
        source = self._source_layer(layer)
        both_keys = torch.stack([keys, memory[Read("keys", source)]], dim=2).flatten(1, 2)
        both_values = torch.stack([values, memory[Read("values", source)]], dim=2).flatten(1, 2)
        return attend(q.repeat_interleave(2, dim=1), both_keys, both_values)[:, 1::2]

    def _source_layer(self, layer: int) -> int:
        return layer - 1 if self.other == "previous" else 0


class HeadNorm(ValueRoute):
    """û = u / RMS(u) ⊙ λ of each head's output before W_o, λ (d,) shared by a layer's heads.

    Head-wise RMSNorm of The Structural Origin of Attention Sink (Li et al. 2026, arXiv 2605.06611,
    section 5.1): all tokens' aggregated values have one size, the first token's too, which are a
    mean over nothing but its own. λ starts at 1. With `scale=False` there is no λ, as in Muse Spark
    (Transformers' `MuseSparkTextAttention.o_norm`), which gates the norm's output:
    `then(head_norm(scale=False), output_gate(per="channel"))`.
    """

    examples = ("wakeful_papers.routes:HeadNorm", "wakeful_papers.routes:HeadNorm(scale=False)")
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

    examples = ("wakeful_papers.routes:ValueNorm",)
    mixes = frozenset({"value"})

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        return qkv._replace(v=F.rms_norm(qkv.v, qkv.v.shape[-1:], eps=_EPS))


class ValueScale(ValueRoute):
    """v̂ = r / (r + C) v with r = ‖v‖² and C = D d σ² e^θ, θ = 0 at the start.

    V-scale of Attention Sinks Induce Gradient Sinks (Chen et al. 2026, arXiv 2603.17771, section
    5): one θ per layer and value head, D the stream's width, d the head's and σ, `std`, the initial
    weights' standard deviation, so that C is what r is expected to be at the start. A sink's
    value, which is small, passes r / C of its gradient on; a large value stays as it is.
    """

    examples = ("wakeful_papers.routes:ValueScale",)
    neutral = "wakeful_papers.routes:ValueScale(std=0.0)"
    mixes = frozenset({"value"})
    by_layer = True

    def __init__(self, *, std: float = 0.02) -> None:
        super().__init__()
        if std < 0:
            raise WakefulError(f"value_scale: std must not be negative, got {std:g}")
        self.std = std

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        """Create θ = 0 for each layer and value head."""
        super().attach(shape, layers)
        heads = shape.num_kv_heads
        self.exponents = nn.ParameterDict(
            {str(layer): nn.Parameter(torch.zeros(heads)) for layer in self.layers}
        )

    @torch.no_grad()
    def start_plain(self) -> str:
        """Set θ so that C is small but not 0 and return a sentence on that, or "" if `std` is 0."""
        if not self.std:  # C is 0, and nothing changes
            return ""
        for exponents in self.exponents.values():
            exponents.fill_(_NEARLY_PLAIN)
        factor = math.exp(_NEARLY_PLAIN)  # C = 0 would be plain, but then θ has no gradient
        return f"{self} starts with C of {factor:.4f} of their size, for zero cannot learn"

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        """Scale each value by r / (r + C), r its squared norm."""
        r = torch.linalg.vecdot(qkv.v, qkv.v).unsqueeze(-1)
        start = self.shape.width * self.shape.head_width * self.std**2
        c = (start * self.exponents[str(layer)].exp()).to(r.dtype).unsqueeze(-1)
        total = (r + c).clamp_min(torch.finfo(r.dtype).tiny)
        return qkv._replace(v=r / total * qkv.v)


class XSA(ValueRoute):
    """u'_i = u_i − α (u_i · v̂_i) v̂_i with v̂_i = v_i / ‖v_i‖ (Exclusive Self Attention, 2603.09078).

    v_i is the value that the token itself offers to the head. The paper's α is 1, which is
    `learned=False`; otherwise α = tanh(a) with a learned a for each head, zero at the start.
    """

    examples = ("wakeful_papers.routes:XSA", "wakeful_papers.routes:XSA(learned=False)")
    neutral = "wakeful_papers.routes:XSA"
    by_layer = True

    def __init__(self, *, learned: bool = True) -> None:
        super().__init__()
        self.learned = learned

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        super().attach(shape, layers)
        if self.learned:
            self.strengths = nn.Parameter(torch.zeros(len(self.layers), shape.num_heads))

    @torch.no_grad()
    def start_plain(self) -> str:
        """Set α to 0 if it is learned; return what the route still changes, "" if nothing."""
        if not self.learned:
            return super().start_plain()
        self.strengths.zero_()
        return ""

    def correct(self, layer: int, x: Tensor, u: Tensor, v: Tensor, memory: Memory) -> Tensor:
        """Return u − α (u · v̂) v̂ of each head."""
        # Query heads that share a value head are taken together, so that no value is repeated.
        groups = v.shape[2]
        norm = torch.linalg.vector_norm(v, dim=-1, keepdim=True)
        direction = (v / norm.clamp_min(torch.finfo(v.dtype).tiny)).unsqueeze(3)
        grouped = u.unflatten(2, (groups, -1))
        component = (grouped * direction).sum(-1, keepdim=True)  # u · v̂
        if self.learned:
            alpha = self.strengths[self.row_of[layer]].tanh().to(u.dtype)
            component = component * alpha.view(groups, -1, 1)
        return torch.addcmul(grouped, component, direction, value=-1).flatten(2, 3)


class _Sharing(ValueRoute):
    """Each `group` of consecutive layers uses its first layer's `shared` projections; 0: all do."""

    shared: Literal["query", "key"]

    def __init__(self, *, group: int = 0) -> None:
        super().__init__()
        if group < 0:
            raise WakefulError(f"group must not be negative, got {group}")
        self.group = group

    def source(self, layer: int) -> Source:
        leader = layer - layer % self.group if self.group else 0
        return Source(layer, layer, layer)._replace(**{self.shared: leader})


class SharedKeys(_Sharing):
    """Each `group` of consecutive layers uses its first layer's keys; `group=0`, all layers one's.

    Value Residual Learning, fig. 4 (`group=2`) and fig. 16 (all layers): worse than sharing values.
    """

    examples = ("wakeful_papers.routes:SharedKeys", "wakeful_papers.routes:SharedKeys(group=2)")
    neutral = "wakeful_papers.routes:SharedKeys(group=1)"
    shared = "key"


class SharedQueries(_Sharing):
    """Each `group` of consecutive layers uses its first layer's queries; `group=0`, all one's.

    Value Residual Learning, fig. 4 (`group=2`) and fig. 16 (all layers): worse than sharing values.
    Queries are shared as they are projected, keys and values as they are mixed: what a route mixes
    into queries stays in its own layer.
    """

    examples = (
        "wakeful_papers.routes:SharedQueries",
        "wakeful_papers.routes:SharedQueries(group=2)",
    )
    neutral = "wakeful_papers.routes:SharedQueries(group=1)"
    shared = "query"


class Dense(ValueRoute):
    """`V'_n = Σ_{m≤n} λ_{n,m} V_m`, learned (Value Residual Learning, eq. 5 generalized, fig. 9).

    With `learned=False` the weights stay at eq. 5's 1/n. Learned weights start there too, or at
    the vanilla point `λ_{n,n} = 1`, `λ_{n,m<n} = 0` with `vanilla_start=True`.
    """

    examples = ("wakeful_papers.routes:Dense", "wakeful_papers.routes:Dense(learned=False)")
    neutral = "wakeful_papers.routes:Dense(vanilla_start=True)"
    mixes = frozenset({"value"})
    from_second = True

    def __init__(self, *, learned: bool = True, vanilla_start: bool = False) -> None:
        super().__init__()
        if vanilla_start and not learned:
            raise WakefulError("dense: vanilla_start with learned=False would be the plain model")
        self.learned = learned
        self.vanilla_start = vanilla_start

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        """Create the weights of each layer's own and all earlier values, if they are learned."""
        super().attach(shape, layers)
        self.weights = nn.ParameterDict()
        for layer in self.layers if self.learned else ():
            start = torch.full((layer + 1,), 1.0 / (layer + 1))
            if self.vanilla_start:
                start = nn.functional.one_hot(torch.tensor(layer), layer + 1).float()
            self.weights[str(layer)] = nn.Parameter(start)

    @torch.no_grad()
    def start_plain(self) -> str:
        """Weigh each layer's own values by 1 and earlier ones by 0, if weights are learned; return
        what the route changes nevertheless, "" if nothing.
        """
        if not self.learned:
            return super().start_plain()
        for layer in self.layers:
            self.weights[str(layer)].zero_()[layer] = 1.0
        return ""

    @torch.no_grad()
    def take_over(self, reference: ValueRoute, sources: Sequence[int]) -> None:
        """Copy the weights of each layer n from layer `sources[n]` of the reference; values of new
        layers (source −1) get the weight 0.

        Raises:
            WakefulError: layers are not in the reference's order, or one comes twice.
        """
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
            if str(sources[layer]) not in reference.weights:  # new, or the reference's first
                continue
            source_weights = reference.weights[str(sources[layer])]
            for earlier, source in enumerate(sources[: layer + 1]):
                self.weights[str(layer)][earlier] = source_weights[source] if source >= 0 else 0.0

    def reads(self, layer: int) -> frozenset[Read]:
        return frozenset(Read("value", earlier) for earlier in range(layer))

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        """Replace the values by the weighted sum of them and all earlier layers'."""
        values = [memory[Read("value", earlier)] for earlier in range(layer)] + [qkv.v]
        if not self.learned:
            return qkv._replace(v=sum(values[1:], start=values[0]) / len(values))
        weights = self.weights[str(layer)].to(qkv.v.dtype).unbind()
        terms = [weight * value for weight, value in zip(weights, values, strict=True)]
        return qkv._replace(v=sum(terms[1:], start=terms[0]))
