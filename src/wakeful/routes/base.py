"""What a value route may decide, and how routes combine.

Shapes: B batch, L new tokens, S all tokens so far (S = L without a cache), H query heads, G
key/value heads, d head width. Layers are counted from 0 in code, from 1 in the papers' formulas.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.variants import Variant
from wakeful.variants.shape import Shape


class QKV(NamedTuple):
    """Heads of the new tokens: `q` (B, L, H, d), `k` and `v` (B, L, G, d); RoPE is already in."""

    q: Tensor
    k: Tensor
    v: Tensor


class Source(NamedTuple):
    """The layer whose query, key and value projections a layer uses; its own where it has them."""

    query: int
    key: int
    value: int


Basis = Literal["stream", "values"]
"""What a rotation turns: the residual stream, or the values of a head."""
Kind = Literal["query", "key", "value", "keys", "values", "sink", "null", "tokens", "embedded"]


class Read(NamedTuple):
    """One tensor that a layer needs, of an earlier layer or of what stands before the first.

    `query`, `key`, `value` are a layer's projections of the new tokens before any mixing;
    `keys`, `values` are what it attended to: after mixing, the cached past included; `sink` is the
    s of its normalizer, where it has one; `null` is what depth mixes are told of it. Before the
    first layer, at layer −1, are `tokens`, the new tokens' ids (B, L), and `embedded`, x_0: their
    embeddings (B, L, D) as the first block gets them.
    """

    kind: Kind
    layer: int


FIRST_VALUE = Read("value", 0)
"""V_1 of the papers: the first layer's value projection."""

TOKENS = Read("tokens", -1)
EMBEDDED = Read("embedded", -1)
BEFORE_LAYERS = frozenset({TOKENS, EMBEDDED})

Memory = Mapping[Read, Tensor]
"""The tensors that layers state in `reads`, and no others."""
Attend = Callable[..., Tensor]
"""`attend(q, k, v)`: this layer's masked attention.

`attend(q, k, v, like=m)` attends with the scale and sink of layer m, whose `sink` the route reads;
`copies=2` masks keys and values that stand twice in a row (see `CrossLayer`).
"""


class ValueRoute(Variant, nn.Module):
    """Where a layer's values come from and what happens to them around the attention.

    One object serves the whole decoder. `attach` tells it the shape and the layers it acts on, and
    makes its parameters; every method below is then asked layer by layer, and only for those
    layers. A subclass overrides what it changes and states each tensor of another layer in `reads`.
    """

    mixes: frozenset[Kind] = frozenset()
    """The projections that `mix` changes; a layer that borrows one of them refuses the route."""
    from_second = False
    """Whether it leaves layer 0 alone, which has no layer before it."""
    by_layer = False
    """Whether each parameter is of one layer, the first number in its name, or a row for each of
    `layers`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: tuple[int, ...] = ()

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        """Bind the route to a decoder of this shape, acting on `layers`; make its parameters."""
        self.shape = shape
        self.layers = tuple(layer for layer in layers if layer > 0 or not self.from_second)
        self.row_of = {layer: row for row, layer in enumerate(self.layers)}
        """The row of each layer in a parameter that has a row for each of `layers`."""

    def routes(self, layer: int) -> "list[ValueRoute]":
        """Return the elementary routes that act on this layer, in order."""
        return [self] if layer in self.layers else []

    def single_channels(self) -> Mapping[Basis, str]:
        """Say what it does with single channels of the residual stream or of the values.

        No rotation of those leaves the function what it is. Matrices that read all channels of the
        stream are declared by their roles instead, and leave nothing to say here.
        """
        return {}

    def source(self, layer: int) -> Source:
        """Return whose projections the layer uses, decided once when the decoder is built."""
        return Source(layer, layer, layer)

    def reads(self, layer: int) -> frozenset[Read]:
        """Return the tensors that `mix`, `attend` or `correct` will look up in `memory`."""
        return frozenset()

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        """Change queries, keys or values before attention and before they are cached.

        `x` (B, L, D) is the normalized input of the attention.
        """
        return qkv

    def attend(
        self, layer: int, attend: Attend, q: Tensor, keys: Tensor, values: Tensor, memory: Memory
    ) -> Tensor:
        """Return the attention output (B, L, H, d) over keys and values (B, S, G, d)."""
        return attend(q, keys, values)

    def shares(self, layer: int) -> tuple[float, ...]:
        """Return what each of `attend`'s calls weighs in the layer's weights, in their order.

        A route that attends n times to the same values as U = Σ s_m A_m V gives s_1 … s_n; what
        looks at attention then sees Σ s_m A_m, once. Nothing at all says that the layer's weights
        are not one matrix over its own tokens.
        """
        return (1.0,)

    def joined(self, layer: int) -> int:
        """Return how many heads' values stand side by side in what `attend` attends to.

        Each of those heads attends to them all, so that they are there as often.
        """
        return 1

    def correct(self, layer: int, x: Tensor, u: Tensor, v: Tensor, memory: Memory) -> Tensor:
        """Change the attention output `u` (B, L, H, d) before the output projection.

        `x` (B, L, D) is the normalized input of the attention, `v` (B, L, G, d) the value in use.
        """
        return u

    def check(self, layer: int, sources: "list[Source]") -> None:
        """Raise `WakefulError` if the route makes no sense at this layer given all the sources."""

    def acts(self, layer: int) -> bool:
        """Tell whether the route does anything on this layer."""
        steps = ("mix", "attend", "correct")
        changes = any(getattr(type(self), step) is not getattr(ValueRoute, step) for step in steps)
        return changes or self.source(layer) != Source(layer, layer, layer)

    def start_plain(self) -> str:
        """Set the route's parameters to where it changes nothing, if there is such a point.

        Returns what it changes all the same, for a model that inherits plain blocks; "" if nothing.
        """
        return "" if str(self) == self.neutral else f"{self} changes what plain blocks compute"

    @torch.no_grad()
    def take_over(self, reference: "ValueRoute", sources: Sequence[int]) -> None:
        """Copy the parameters that the same route has learned in another decoder.

        `sources[n]` is the layer of that decoder which became layer n here, or −1: such a layer
        keeps its own. Call it after `start_plain`.

        Raises:
            WakefulError: what was learned has no meaning for layers in this order.
        """
        if not self.by_layer and next(self.parameters(), None) is not None:
            raise WakefulError(f"{self} has parameters that another depth cannot inherit")
        for layer in self.layers:
            if sources[layer] in reference.layers:
                theirs = reference._learned(sources[layer])
                for own, learned in zip(self._learned(layer), theirs, strict=True):
                    own.copy_(learned)

    def _learned(self, layer: int) -> list[Tensor]:
        """Return the parameters of one of its layers, `by_layer`."""
        found: list[Tensor] = []
        for name, each in self.named_parameters():
            number = next((part for part in name.split(".") if part.isdigit()), "")
            if number in ("", str(layer)):
                found.append(each if number else each[self.row_of[layer]])
        return found


class Own(ValueRoute):
    """Every layer attends to its own values: U_n = A_n V_n (the vanilla Transformer)."""

    examples = ("own",)
    neutral = "own"


class Then(ValueRoute):
    """Several routes at once: each mixes and corrects what the one before it left."""

    examples = (
        "then(resformer, neutreno(lam=0.2))",
        "then(svformer(anchors=[0, 2]), on_layers([2], gated))",
        "then(cla(group=2), on_layers([2], resformer))",
    )

    def __init__(self, *parts: ValueRoute) -> None:
        super().__init__()
        if not parts:
            raise WakefulError("then(...) needs at least one route")
        for part in parts:
            if not isinstance(part, ValueRoute):
                raise WakefulError(f"then(...) takes routes, not {part!r}")
        self.parts = nn.ModuleList(parts)

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        super().attach(shape, layers)
        for part in self._parts():
            part.attach(shape, self.layers)

    def routes(self, layer: int) -> list[ValueRoute]:
        return [route for part in self._parts() for route in part.routes(layer)]

    def start_plain(self) -> str:
        return "; ".join(filter(None, [part.start_plain() for part in self._parts()]))

    def take_over(self, reference: ValueRoute, sources: Sequence[int]) -> None:
        assert isinstance(reference, Then)
        for part, theirs in zip(self._parts(), reference._parts(), strict=True):
            part.take_over(theirs, sources)

    def _parts(self) -> list[ValueRoute]:
        return [part for part in self.parts if isinstance(part, ValueRoute)]


class OnLayers(ValueRoute):
    """A route on chosen layers only, counted from 0: `on_layers(range(5, 8), resformer)`."""

    name = "on_layers"
    examples = (
        'on_layers(range(1, 3), resformer(mode="constant", scale=5.0))',
        'on_layers([3], resformer(mode="learnable"))',
    )

    def __init__(self, which: "range | list[int] | tuple[int, ...]", route: ValueRoute) -> None:
        super().__init__()
        if not isinstance(which, range | list | tuple) or not all(
            type(layer) is int and layer >= 0 for layer in which
        ):
            raise WakefulError(f"on_layers takes layer numbers from 0, not {which!r}")
        if not isinstance(route, ValueRoute):
            raise WakefulError(f"on_layers takes a route as its second argument, not {route!r}")
        self.which = which
        self.route = route

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        outside = sorted(set(self.which) - set(range(shape.num_layers)))
        if outside or not len(self.which):
            raise WakefulError(
                f"on_layers names the layers {list(self.which)}, but the model has the layers "
                f"0 to {shape.num_layers - 1}"
            )
        super().attach(shape, [layer for layer in layers if layer in set(self.which)])
        self.route.attach(shape, self.layers)
        there = [(layer, route) for layer in self.layers for route in self.route.routes(layer)]
        if not any(route.acts(layer) or str(route) == route.neutral for layer, route in there):
            raise WakefulError(
                f"{self} changes nothing: {self.route} has nothing to do on the layers "
                f"{list(self.layers)}. Layers are counted from 0 here and from 1 in the papers' "
                "formulas, whose layer 1 is 0 here"
            )

    def routes(self, layer: int) -> list[ValueRoute]:
        return self.route.routes(layer)

    def start_plain(self) -> str:
        return self.route.start_plain()

    def take_over(self, reference: ValueRoute, sources: Sequence[int]) -> None:
        assert isinstance(reference, OnLayers)
        self.route.take_over(reference.route, sources)


class RoutePlan:
    """What a route means for each layer of one decoder, settled and checked when it is built."""

    def __init__(self, route: ValueRoute, shape: Shape) -> None:
        route.attach(shape, range(shape.num_layers))
        everywhere = range(shape.num_layers)
        self.routes = [route.routes(layer) for layer in everywhere]
        self.sources = [self._source(layer) for layer in everywhere]
        self.reads = [self._reads(layer) for layer in everywhere]
        for layer in everywhere:
            self._check(layer)
        wanted = frozenset[Read]().union(*self.reads)
        self.before = wanted & BEFORE_LAYERS
        """What routes read of what stands before the first layer."""
        self.leaves: list[frozenset[Kind]] = [
            frozenset(read.kind for read in wanted if read.layer == layer) for layer in everywhere
        ]
        """The tensors each layer must leave behind for later ones."""

    def owns(self, kind: Literal["query", "key", "value"], layer: int) -> bool:
        """Tell whether the layer has this projection itself."""
        return getattr(self.sources[layer], kind) == layer

    def _source(self, layer: int) -> Source:
        chosen: dict[str, tuple[int, ValueRoute]] = {}
        for route in self.routes[layer]:
            for kind, owner in route.source(layer)._asdict().items():
                if owner == layer:
                    continue
                if kind in chosen and chosen[kind][0] != owner:
                    raise WakefulError(
                        f"{chosen[kind][1]} and {route} both decide where layer {layer}'s {kind} "
                        "comes from; keep one of them, or give them different layers with on_layers"
                    )
                chosen[kind] = (owner, route)
        own = Source(layer, layer, layer)
        return own._replace(**{kind: owner for kind, (owner, _) in chosen.items()})

    def _reads(self, layer: int) -> frozenset[Read]:
        read_of: tuple[Kind, ...] = ("query", "keys", "values")
        borrowed = map(Read, read_of, self.sources[layer])
        reads = frozenset(read for read in borrowed if read.layer != layer)
        return reads.union(*(route.reads(layer) for route in self.routes[layer]))

    def _check(self, layer: int) -> None:
        source = self.sources[layer]
        for kind in ("query", "key", "value"):
            owner = getattr(source, kind)
            if getattr(self.sources[owner], kind) != owner:
                raise WakefulError(
                    f"layer {layer} would borrow its {kind} from layer {owner}, which has none of "
                    f"its own (it borrows from layer {getattr(self.sources[owner], kind)})"
                )
            for route in self.routes[layer]:
                if owner != layer and kind in route.mixes:
                    raise WakefulError(
                        f"{route} mixes the {kind} of layer {layer}, which has no {kind} of its "
                        f"own (it borrows layer {owner}'s); restrict it with on_layers"
                    )
        replacing = [r for r in self.routes[layer] if type(r).attend is not ValueRoute.attend]
        if len(replacing) > 1:
            raise WakefulError(
                f"{replacing[0]} and {replacing[1]} both replace the attention of layer {layer}"
            )
        for route in self.routes[layer]:
            route.check(layer, self.sources)
        for read in self.reads[layer] - BEFORE_LAYERS:
            if read.layer >= layer or read.layer < 0:
                raise WakefulError(f"layer {layer} cannot read {read.kind} of layer {read.layer}")
            if read.kind in ("query", "key", "value") and not self.owns(read.kind, read.layer):
                raise WakefulError(
                    f"layer {layer} reads the {read.kind} of layer {read.layer}, which has no "
                    f"{read.kind} projection of its own"
                )
