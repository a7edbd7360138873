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

        The cache is not moved: it lies where its layers lie.
        """
        moved = tree_map_only(
            Tensor,
            lambda tensor: tensor.to(device),
            (self.memory, self.rotations, self.keep, self.near),
        )
        memory, rotations, keep, near = moved
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
    """Return a projection split into heads, normalized, and rotated.

    `norm` acts on each head, or on all heads of a token together if its weight is that wide.
    `rotary` names one of the rotations of this forward pass (`flow`), "" for none.
    """
    batch, length, width = projected.shape
    split = (batch, length, num_heads, width // num_heads)
    weight = getattr(norm, "weight", None)
    if weight is not None and len(weight) == width:
        heads = norm(projected).reshape(split)
    else:
        heads = norm(projected.reshape(split))
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
        super().__init__()
        size = (num_tokens, shape.num_kv_heads, shape.head_width)
        self.keys = nn.Parameter(torch.zeros(size)) if keys else None
        self.values = nn.Parameter(torch.zeros(size)) if values else None

    def forward(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values (B, P + L, G, d): the stored ones, then those given. Borrowed
        ones, for which nothing is stored here, have their prefix already.
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
        """Return attention (B, L, H, d) by the normalizer, causal unless the mask `keep` (1 or B,
        L, S) is given.
        """
        if not self.normalizer.fused:
            weigh = self.normalizer.weights
            return attend_by_definition(q, k, v, weigh, scale=self.scale, keep=keep)
        # Stored keys ahead of a whole text's: padding queries, as many, make the mask a plain
        # triangle, for which fused kernels are fast.
        num_padding = self.stored if keep is None and k.shape[1] == self.stored + q.shape[1] else 0
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
        """Build the projections of the heads that `plan` gives this layer; others are borrowed."""
        super().__init__()
        shape, stored = config.shape, config.stored_prefix
        width, head_width = shape.width, shape.head_width
        source = plan.sources[layer]

        def make_heads(
            part: Literal["query", "key", "value"], num_heads: int, read: Read
        ) -> Heads | BorrowedHeads:
            """Return a projection into heads, or heads borrowed by `read` if the plan says so."""
            if not plan.owns(part, layer):
                return BorrowedHeads(read)
            norm = nn.Identity() if part == "value" else head_norm(part)
            rotary = "" if part == "value" else config.rope_table_name(layer)
            return Heads(
                width, num_heads, head_width, bias=config.qkv_bias, rotary=rotary, norm=norm
            )

        self.layer = layer
        self.local = layer in config.local_layers
        self.query = make_heads("query", shape.num_heads, Read("query", source.query))
        self.key = make_heads("key", shape.num_kv_heads, Read("keys", source.key))
        self.value = make_heads("value", shape.num_kv_heads, Read("values", source.value))
        scale = 1.0 / math.sqrt(config.query_scalar or head_width)
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
        """What later layers read of this one: "query", "key", "value", "keys", "values"."""
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
        """Return the attention's output (B, L, D) and the tensors that later layers read, given
        separate inputs for the queries (`x`, which routes see too), the keys and the values.

        `flow` is the state of the forward pass: masks, rotary angles, the cache and what earlier
        layers gave.
        """
        raw = mixed = QKV(self.query(x, flow), self.key(x_key, flow), self.value(x_value, flow))
        for route in self.mixers:
            mixed = route.mix(self.layer, x, mixed, flow.memory)
        queries = mixed.q if self.turn is None else self.turn(mixed.q)
        keys, values = self._prepare_keys_and_values(mixed.k, mixed.v, flow)
        normalizer = self.dot.normalizer
        sink = normalizer.log_sink(x) if normalizer.fused else None
        dot = partial(self.dot, keep=flow.mask(self.local), sink=sink)
        if self.attenders:  # one route at most
            u = self.attenders[0].attend(self.layer, dot, queries, keys, values, flow.memory)
        else:
            u = dot(queries, keys, values)
        for route in self.correctors:
            new_values = values[:, -x.shape[1] :]  # without those in a cache or a stored prefix
            u = route.correct(self.layer, x, u, new_values, flow.memory)
        tensors: dict[Kind, Tensor] = {
            "query": raw.q, "key": raw.k, "value": raw.v, "keys": keys, "values": values
        }  # fmt: skip
        shared = {Read(kind, self.layer): tensors[kind] for kind in self.shared_kinds}
        return self.out(u.flatten(2)), shared

    def _prepare_keys_and_values(
        self, keys: Tensor, values: Tensor, flow: Flow
    ) -> tuple[Tensor, Tensor]:
        """Return the new tokens' keys and values as attention reads them: rotated, rounded in a
        quantized model, and after those in the cache or the stored prefix.

        Borrowed ones are so already: the layer that owns them did it.
        """
        if self.owns_key:
            keys = keys if self.turn is None else self.turn(keys)
            keys = keys if self.quantized is None else self.quantized(keys, "keys")
        if self.owns_value and self.quantized is not None:
            values = self.quantized(values, "values")
        stored = self.stored if self.dot.stored else None
        if flow.cache is not None:
            if self.owns_key:
                prefix = None if stored is None else stored.keys
                keys = flow.cache.extend(("keys", self.layer), keys, prefix)
            if self.owns_value:
                prefix = None if stored is None else stored.values
                values = flow.cache.extend(("values", self.layer), values, prefix)
        elif stored is not None:
            keys, values = stored(keys, values)
        return keys, values
