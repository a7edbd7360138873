"""Attention of one layer: project, rotate, mix, attend, correct, project back.

Shapes: B batch, L new tokens, S all tokens so far, H query heads, G key/value heads, d head width.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from wakeful.config.model import ModelConfig, RotationName
from wakeful.model.attend import attend, attend_by_definition
from wakeful.model.cache import Cache
from wakeful.model.positions import CosSin, turn_pairs
from wakeful.model.turned import WalshHadamard
from wakeful.normalizers.base import Normalizer
from wakeful.norms.base import NormSite
from wakeful.routes.base import QKV, Kind, Read, RoutePlan, ValueRoute
from wakeful.variants.roles import BIAS, READS, WRITES, HasRoles, Role
from wakeful.variants.shape import Shape


@dataclass(frozen=True)
class Flow:
    """State of a forward pass that all blocks share: tensors of earlier layers, the cache, rotary
    angles and attention masks.

    `memory` fills as layers run: each adds the tensors that later layers read (V_1 above all).
    It is an argument of every block, never a side effect of one, so recomputing a block under
    activation checkpointing, compiling it or sharding it changes nothing.
    """

    memory: dict[Read, Tensor]
    cache: Cache | None
    rotations: Mapping[RotationName, CosSin]
    keep: Tensor | None
    """Boolean (B, L, S): which keys each query sees; None for plain causal attention."""
    near: Tensor | None = None
    """The mask of local layers; None where their window is no shorter than the text."""

    def mask(self, local: bool) -> Tensor | None:
        """Return a layer's attention mask (B, L, S); None for plain causal attention."""
        return self.near if local and self.near is not None else self.keep

    def to(self, device: torch.device | str | int) -> "Flow":
        """Return the flow with its tensors on a device, for models spread over several devices.

        The cache is not moved: each layer's keys and values are on that layer's device already.
        """
        memory, rotations, keep, near = tree_map_only(
            Tensor,
            lambda tensor: tensor.to(device),
            (self.memory, self.rotations, self.keep, self.near),
        )
        return Flow(memory=memory, cache=self.cache, rotations=rotations, keep=keep, near=near)


class Heads(HasRoles, nn.Linear):
    """A projection into heads, (B, L, D) to (B, L, N, d), each normalized by `norm`, then rotated
    by the flow's rotation that `rotary` names ("" for none).
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        head_width: int,
        *,
        bias: bool,
        rotary: RotationName,
        norm: nn.Module,
    ) -> None:
        """Make the projection of `width` channels to all heads.

        `norm` will normalize the heads. `rotary` names the rotation of the forward pass (RoPE
        table) that they get, "" for none.
        """
        super().__init__(width, num_heads * head_width, bias=bias)
        self.heads = num_heads
        self.rotary: RotationName = rotary
        self.norm = norm

    def roles(self) -> Mapping[str, Role]:
        return {"weight": READS, "bias": BIAS}

    def forward(self, x: Tensor, flow: Flow) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return into_heads(super().forward(x), self.heads, self.norm, flow, rotary=self.rotary)


def into_heads(
    projected: Float[Tensor, "B L P"],
    num_heads: int,
    norm: nn.Module,
    flow: Flow,
    *,
    rotary: RotationName,
) -> Float[Tensor, "B L N d"]:
    """Return a projection split into heads, normalized by `norm`, and rotated.

    A norm with P weights acts on all heads of a token together, any other on each head. `rotary`
    names one of the rotations of this forward pass (`flow`), "" for none.
    """
    batch, length, width = projected.shape
    heads_shape = (batch, length, num_heads, width // num_heads)
    weight = getattr(norm, "weight", None)
    if weight is not None and len(weight) == width:
        heads = norm(projected).reshape(heads_shape)
    else:
        heads = norm(projected.reshape(heads_shape))
    return turn_pairs(heads, flow.rotations[rotary]) if rotary else heads


class BorrowedHeads(nn.Module):
    """Heads of another layer, read from the flow's memory instead of projected."""

    def __init__(self, read: Read) -> None:
        super().__init__()
        self.read = read

    def forward(self, x: Tensor, flow: Flow) -> Tensor:
        return flow.memory[self.read]


class StoredPrefix(HasRoles, nn.Module):
    """Keys and values (P, G, d) of P tokens that precede every sequence.

    They have the form in which they are cached: keys with their positions, values after the route's
    mixing. A layer that borrows keys or values of another layer borrows their prefix with them.
    """

    default_role = Role()

    def __init__(self, num_tokens: int, shape: Shape, *, keys: bool, values: bool) -> None:
        """Create the stored keys and values, as zeros.

        A layer that borrows its keys or its values passes False for them, and nothing is stored.
        """
        super().__init__()
        size = (num_tokens, shape.num_kv_heads, shape.head_width)
        self.keys = nn.Parameter(torch.zeros(size)) if keys else None
        self.values = nn.Parameter(torch.zeros(size)) if values else None

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return (keys, values), each (B, P + L, G, d): the stored ones, then those given.

        Borrowed keys or values are returned as they are: nothing is stored for them here, and the
        layer that owns them has put its prefix before them.
        """
        return self._prepend(self.keys, keys), self._prepend(self.values, values)

    def _prepend(self, stored: Tensor | None, heads: Tensor) -> Tensor:
        if stored is None:
            return heads
        first = stored.to(heads.dtype).expand(heads.shape[0], *stored.shape)
        return torch.cat([first, heads], dim=1)


class DotProduct(nn.Module):
    """Masked attention of one layer, given its heads; a hook on it sees every q, k and v.

    `sink` is the logarithm of the term that a fused normalizer adds to the denominator, for each
    head or for each query and head. `stored` is the number of keys that precede those of the text.
    """

    def __init__(self, normalizer: Normalizer, *, scale: float, stored: int = 0) -> None:
        super().__init__()
        self.normalizer = normalizer
        self.scale = scale
        self.stored = stored

    def forward(
        self,
        q: Float[Tensor, "B L H d"],
        k: Float[Tensor, "B S G d"],
        v: Float[Tensor, "B S G d"],
        *,
        keep: Tensor | None,
        sink: Float[Tensor, "*queries H"] | None = None,
    ) -> Float[Tensor, "B L H d"]:
        """Return each query's weighted sum of the values, with weights by the normalizer.

        Without `keep` attention is causal: the L queries are the last of the S tokens. `keep` (1 or
        B, L, S) is True where a query sees a key. e^`sink` is added to the softmax's denominator
        for each head or for each query and head; None adds nothing.
        """
        # A fused normalizer is a softmax, which fused kernels compute; others have no such kernel.
        if not self.normalizer.fused:
            weigh = self.normalizer.weights
            return attend_by_definition(q, k, v, weigh, scale=self.scale, keep=keep)
        # If the keys are those of a stored prefix and then one for each query, as many padding
        # queries in front make the causal mask a plain triangle, for which fused kernels are fast.
        is_whole_text = k.shape[1] == self.stored + q.shape[1]
        num_padding = self.stored if keep is None and is_whole_text else 0
        if num_padding:
            q = F.pad(q, (0, 0, 0, 0, num_padding, 0))
            if sink is not None and sink.dim() == 3:  # (B, L, H): one for each query
                sink = F.pad(sink, (0, 0, num_padding, 0))
        out = attend(q, k, v, sink=sink, scale=self.scale, keep=keep)
        return out[:, num_padding:] if num_padding else out


class Attention(HasRoles, nn.Module):
    """One layer's attention under a value route."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        plan: RoutePlan,
        normalizer: Normalizer,
        head_norm: Callable[[NormSite], nn.Module],
    ) -> None:
        """Build layer number `layer`: projections of the heads that it owns by `plan`, readers of
        the heads that it borrows from other layers, and the output projection.

        `head_norm` makes the norm of its "query" or "key" heads.
        """
        super().__init__()
        shape, stored = config.shape, config.stored_prefix
        width, head_width = shape.width, shape.head_width
        source = plan.sources[layer]

        def make_heads(
            part: Literal["query", "key", "value"], num_heads: int, read: Read
        ) -> Heads | BorrowedHeads:
            """Return a projection into heads, or a reader of another layer's heads (`read`) if the
            plan lets this layer borrow them.
            """
            if not plan.owns(part, layer):
                return BorrowedHeads(read)
            # Values are neither normalized nor rotated.
            norm = nn.Identity() if part == "value" else head_norm(part)
            rotary = "" if part == "value" else config.rope_table_name(layer)
            return Heads(
                width, num_heads, head_width, bias=config.qkv_bias, rotary=rotary, norm=norm
            )

        self.layer = layer
        self.local = layer in config.local_layers
        """True if queries see only the keys within the model's window."""
        # Queries are borrowed as they are projected, keys and values as they are attended to.
        self.query = make_heads("query", shape.num_heads, Read("query", source.query))
        self.key = make_heads("key", shape.num_kv_heads, Read("keys", source.key))
        self.value = make_heads("value", shape.num_kv_heads, Read("values", source.value))
        scale = 1.0 / math.sqrt(config.query_scalar or head_width)  # 0: by the head's width
        if config.scale_logits_by_layer:
            scale /= layer + 1
        self.dot = DotProduct(normalizer, scale=scale, stored=stored)
        self.out = nn.Linear(shape.num_heads * head_width, width, bias=config.out_bias)
        self.turn = WalshHadamard() if config.qk_rotation else None
        """Applied to queries and keys after RoPE and any route."""
        self.quantized: nn.Module | None = None
        """Applied to keys and values before they are cached, in a quantized model."""
        self.owns_key, self.owns_value = plan.owns("key", layer), plan.owns("value", layer)
        if stored:
            self.stored = StoredPrefix(stored, shape, keys=self.owns_key, values=self.owns_value)
        self.shared_kinds: tuple[Kind, ...] = tuple(sorted(plan.shared_kinds[layer]))
        """Kinds of this layer's tensors that later layers read, such as "value"; `forward` returns
        these tensors."""
        # The layer's routes by the method that they override, in plain lists: the decoder owns
        # the routes and their parameters.
        routes = plan.routes[layer]
        self.mixers = [r for r in routes if type(r).mix is not ValueRoute.mix]
        self.correctors = [r for r in routes if type(r).correct is not ValueRoute.correct]
        self.attenders = [r for r in routes if type(r).attend is not ValueRoute.attend]

    def roles(self) -> Mapping[str, Role]:
        return {"out.weight": WRITES, "out.bias": BIAS}

    def forward(self, x: Tensor, flow: Flow) -> tuple[Tensor, dict[Read, Tensor]]:
        """Return the attention's output (B, L, D) and the tensors that later layers read."""
        return self.forward_qkv(x, x, x, flow)

    def forward_qkv(
        self, x: Tensor, x_key: Tensor, x_value: Tensor, flow: Flow
    ) -> tuple[Tensor, dict[Read, Tensor]]:
        """Return the attention's output (B, L, D) and, by kind and layer, this layer's tensors that
        later layers read.

        The three inputs (B, L, D) are projected into queries, keys and values. The routes of this
        layer may change the heads (`mix`), the attention (`attend`) and its output (`correct`);
        they see `x`. `flow` is the state of the forward pass: masks, rotary angles, the cache, into
        which new keys and values are written, and the tensors of earlier layers.
        """
        projected = QKV(self.query(x, flow), self.key(x_key, flow), self.value(x_value, flow))
        mixed = projected
        for route in self.mixers:
            mixed = route.mix(self.layer, x, mixed, flow.memory)
        queries = mixed.q if self.turn is None else self.turn(mixed.q)
        keys, values = self._prepare_keys_and_values(mixed.k, mixed.v, flow)
        normalizer = self.dot.normalizer
        sink = normalizer.log_sink(x) if normalizer.fused else None  # others have no sink
        dot = partial(self.dot, keep=flow.mask(self.local), sink=sink)
        if self.attenders:  # at most one: the plan refuses a second
            u = self.attenders[0].attend(self.layer, dot, queries, keys, values, flow.memory)
        else:
            u = dot(queries, keys, values)
        for route in self.correctors:
            new_values = values[:, -x.shape[1] :]  # without those in a cache or a stored prefix
            u = route.correct(self.layer, x, u, new_values, flow.memory)
        tensors: dict[Kind, Tensor] = {
            "query": projected.q, "key": projected.k, "value": projected.v,
            "keys": keys, "values": values,
        }  # fmt: skip
        shared = {Read(kind, self.layer): tensors[kind] for kind in self.shared_kinds}
        return self.out(u.flatten(2)), shared

    def _prepare_keys_and_values(
        self, keys: Tensor, values: Tensor, flow: Flow
    ) -> tuple[Tensor, Tensor]:
        """Return (keys, values) of all tokens so far (B, S, G, d), given those of the new tokens.

        The new tokens' keys are rotated by `turn`, if the model has it, and both are rounded in a
        quantized model. With a cache they are added to it, and it returns all; without one they
        follow the stored prefix, if there is one.

        Borrowed keys or values stay as they are: the layer that owns them has done all this.
        """
        if self.owns_key:
            keys = keys if self.turn is None else self.turn(keys)
            keys = keys if self.quantized is None else self.quantized(keys, "keys")
        if self.owns_value and self.quantized is not None:
            values = self.quantized(values, "values")
        prefix = self.stored if self.dot.stored else None
        if flow.cache is not None:
            if self.owns_key:
                prefix_keys = None if prefix is None else prefix.keys
                keys = flow.cache.extend(("keys", self.layer), keys, prefix_keys)
            if self.owns_value:
                prefix_values = None if prefix is None else prefix.values
                values = flow.cache.extend(("values", self.layer), values, prefix_values)
        elif prefix is not None:
            keys, values = prefix(keys, values)  # leaves borrowed ones as they are
        return keys, values
