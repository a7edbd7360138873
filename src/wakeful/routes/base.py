"""The base class of value routes, their combinations, and the plan of a decoder's routes.

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
    """Heads of the new tokens: `q` (B, L, H, d), `k` and `v` (B, L, G, d), after RoPE."""

    q: Tensor
    k: Tensor
    v: Tensor


class Source(NamedTuple):
    """The layers whose query, key and value projections a layer uses, such as its own."""

    query: int
    key: int
    value: int


Basis = Literal["stream", "values"]
"""The vectors that a rotation acts on: the residual stream, or the values of a head."""
Kind = Literal["query", "key", "value", "keys", "values", "tokens", "embedded"]


class Read(NamedTuple):
    """One tensor of an earlier layer, or of the model's input, that a layer needs.

    `query`, `key`, `value` are a layer's projections of the new tokens before any mixing; `keys`,
    `values` are those of all tokens after mixing, which it attends to. The input has layer −1:
    `tokens`, the new tokens' ids (B, L), and `embedded`, their embeddings x_0 (B, L, D) as the
    first block receives them.
    """

    kind: Kind
    layer: int


FIRST_VALUE = Read("value", 0)
"""V_1 of the papers: the first layer's value projection."""

TOKENS = Read("tokens", -1)
EMBEDDED = Read("embedded", -1)
BEFORE_LAYERS = frozenset({TOKENS, EMBEDDED})

Memory = Mapping[Read, Tensor]
"""The tensors that layers declare in `reads`."""
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`attend(q, k, v)`: this layer's masked attention."""


class ValueRoute(Variant, nn.Module):
    """The source of each layer's values, and the operations on them around the attention.

    One object serves the whole decoder. `attach` sets the shape and the layers it acts on and
    creates its parameters; the methods below are then called for each of those layers. A subclass
    overrides the operations that it changes and declares all tensors of other layers in `reads`.
    """

    mixes: frozenset[Kind] = frozenset()
    """The projections that `mix` changes; layers that borrow one of them cannot have the route."""
    from_second = False
    """True if the route acts from layer 1 on: layer 0 has no layer before it."""
    one_matrix = True
    """False if `attend` calls attention several times, or over other keys than the layer's own: no
    L × L matrix describes the layer's attention then, and probes of attention do not apply."""
    by_layer = False
    """True if each parameter belongs to one layer, the first number in its name, or has a row for
    each of `layers`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers: tuple[int, ...] = ()

    def attach(self, shape: Shape, layers: Iterable[int]) -> None:
        """Bind the route to `layers` of a decoder of this shape, without layer 0 if the route is
        `from_second`. Subclasses create their parameters here.
        """
        self.shape = shape
        self.layers = tuple(layer for layer in layers if layer > 0 or not self.from_second)
        self.row_of = {layer: row for row, layer in enumerate(self.layers)}
        """Index of each layer in parameters that have a row for each of `layers`."""

    def routes(self, layer: int) -> "list[ValueRoute]":
        """Return the elementary routes that act on this layer, in order."""
        return [self] if layer in self.layers else []

    def single_channels(self) -> Mapping[Basis, str]:
        """Return what the route does to single channels, such as
        {"values": "has a scale for each of"}; {} if nothing.

        A key is the basis: "stream" for the channels of the residual stream, "values" for those of
        a head's values. Such operations do not commute with a rotation of that basis. Matrices that
        read all channels of the stream are not listed here: their roles declare them.
        """
        return {}

    def source(self, layer: int) -> Source:
        """Return the layers whose projections this layer uses; called when a decoder is built."""
        return Source(layer, layer, layer)

    def reads(self, layer: int) -> frozenset[Read]:
        """Return which tensors of earlier layers or of the model's input `mix`, `attend` and
        `correct` look up in `memory`.
        """
        return frozenset()

    def mix(self, layer: int, x: Tensor, qkv: QKV, memory: Memory) -> QKV:
        """Return queries, keys and values as they are to be cached and attended to; a subclass may
        change those that the layer has projected (`qkv`).

        `x` (B, L, D) is the normalized input of the attention, and `memory` holds the tensors that
        `reads` declares.
        """
        return qkv

    def attend(
        self, layer: int, attend: Attend, q: Tensor, keys: Tensor, values: Tensor, memory: Memory
    ) -> Tensor:
        """Return the attention output (B, L, H, d) of queries `q` (B, L, H, d) over keys and values
        (B, S, G, d).

        `attend(q, k, v)` is the layer's masked attention. A subclass may call it several times or
        with other heads. `memory` holds the tensors that `reads` declares.
        """
        return attend(q, keys, values)

    def heads_per_value(self, layer: int) -> int:
        """Return how many key/value heads share their values: 1 if each has its own.

        If n heads do, `attend` gives attention the values of all n side by side, once for each of
        these heads.
        """
        return 1

    def correct(self, layer: int, x: Tensor, u: Tensor, v: Tensor, memory: Memory) -> Tensor:
        """Return the attention's output for the output projection; a subclass may change `u`
        (B, L, H, d), what attention gave.

        `x` (B, L, D) is the normalized input of the attention, `v` (B, L, G, d) the new tokens'
        values that attention used, and `memory` holds the tensors that `reads` declares.
        """
        return u

    def check(self, layer: int, sources: "list[Source]") -> None:
        """Raise `WakefulError` if the route makes no sense at this layer; `sources` has the source
        of each layer.
        """

    def acts(self, layer: int) -> bool:
        """Return True if the route changes anything in this layer: its class overrides `mix`,
        `attend` or `correct`, or the layer uses a projection of another layer.
        """
        kind = type(self)
        overrides = (
            kind.mix is not ValueRoute.mix
            or kind.attend is not ValueRoute.attend
            or kind.correct is not ValueRoute.correct
        )
        return overrides or self.source(layer) != Source(layer, layer, layer)

    def start_plain(self) -> str:
        """Return a sentence on what the route changes in a model whose blocks are copied from one
        without a route; "" if nothing.

        A subclass with parameters first sets them so that the route changes nothing, or as little
        as it can. This base class sets none.
        """
        return "" if str(self) == self.neutral else f"{self} changes what plain blocks compute"

    @torch.no_grad()
    def take_over(self, reference: "ValueRoute", sources: Sequence[int]) -> None:
        """Copy the trained parameters of `reference`, the same route in another decoder.

        Layer n here was layer `sources[n]` there. Where that is −1, a new layer, or a layer on
        which `reference` does not act, the parameters stay as `start_plain` has set them.

        Raises:
            WakefulError: the parameters do not apply to layers in this order.
        """
        has_parameters = next(self.parameters(), None) is not None
        if has_parameters and not self.by_layer:
            raise WakefulError(f"{self} has parameters that another depth cannot inherit")
        for layer in self.layers:
            if sources[layer] in reference.layers:
                parameters = self._parameters_of_layer(layer)
                trained = reference._parameters_of_layer(sources[layer])
                for parameter, values in zip(parameters, trained, strict=True):
                    parameter.copy_(values)

    def _parameters_of_layer(self, layer: int) -> list[Tensor]:
        """Return one layer's parameters, in the order of `named_parameters`.

        A parameter with a number in its name, such as `gates.3.weight`, belongs to the layer of
        that number. One without has a row for each layer, and this layer's row is returned.
        """
        parameters: list[Tensor] = []
        for name, parameter in self.named_parameters():
            number = next((part for part in name.split(".") if part.isdigit()), None)
            if number is None:
                parameters.append(parameter[self.row_of[layer]])
            elif number == str(layer):
                parameters.append(parameter)
        return parameters


class Own(ValueRoute):
    """Every layer attends to its own values: U_n = A_n V_n (the vanilla Transformer)."""

    examples = ("own",)
    neutral = "own"


class Then(ValueRoute):
    """Several routes in sequence: each mixes and corrects the results of the one before it."""

    examples = (
        "then(resformer, neutreno(lam=0.2))",
        "then(svformer(anchors=[0, 2]), on_layers([2], gated))",
        "then(cla(group=2), on_layers([2], resformer))",
    )

    def __init__(self, *parts: ValueRoute) -> None:
        """Store the routes; raise `WakefulError` if there are none or one is no route."""
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
        """Copy the trained parameters of each part from the same part of `reference`."""
        assert isinstance(reference, Then)
        for part, reference_part in zip(self._parts(), reference._parts(), strict=True):
            part.take_over(reference_part, sources)

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
        """Store a route and the numbers of the layers (`which`) that it is to act on.

        Raises:
            WakefulError: `which` is no list of layer numbers, or `route` no route.
        """
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
        """Attach the inner route to those of `layers` that are chosen (`which`).

        Raises:
            WakefulError: no layer is chosen, or one that does not exist, or the inner route changes
                nothing on the chosen layers.
        """
        outside = sorted(set(self.which) - set(range(shape.num_layers)))
        if outside or not len(self.which):
            raise WakefulError(
                f"on_layers names the layers {list(self.which)}, but the model has the layers "
                f"0 to {shape.num_layers - 1}"
            )
        super().attach(shape, [layer for layer in layers if layer in set(self.which)])
        self.route.attach(shape, self.layers)
        routes = [(layer, route) for layer in self.layers for route in self.route.routes(layer)]
        # A route that is its own `neutral` setting, such as `own`, changes nothing by intention.
        if not any(route.acts(layer) or str(route) == route.neutral for layer, route in routes):
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
    """The routes, sources and shared tensors of each layer, decided when a decoder is built."""

    def __init__(self, route: ValueRoute, shape: Shape) -> None:
        """Attach a route to all layers; find each layer's elementary routes, the layers whose
        projections it uses, and the tensors that it reads.

        Raises:
            WakefulError: the route does not fit the shape, or its parts contradict each other.
        """
        layers = range(shape.num_layers)
        route.attach(shape, layers)
        self.routes = [route.routes(layer) for layer in layers]
        """For each layer: the elementary routes that act on it, in order."""
        self.sources = [self._source(layer) for layer in layers]
        """For each layer: the layers whose projections it uses."""
        self.reads = [self._reads(layer) for layer in layers]
        """For each layer: the tensors of earlier layers and of the model's input that it reads."""
        for layer in layers:
            self._check(layer)
        all_reads = frozenset[Read]().union(*self.reads)
        self.before = all_reads & BEFORE_LAYERS
        """The tensors of the model's input, before all layers, that routes read."""
        self.shared_kinds: list[frozenset[Kind]] = [
            frozenset(read.kind for read in all_reads if read.layer == layer) for layer in layers
        ]
        """For each layer: the kinds of its tensors that later layers read."""

    def owns(self, kind: Literal["query", "key", "value"], layer: int) -> bool:
        """Return True if the layer has its own projection of this kind."""
        return getattr(self.sources[layer], kind) == layer

    def _source(self, layer: int) -> Source:
        """Return the layers whose query, key and value projections this layer uses.

        Raises:
            WakefulError: two routes name different layers for the same projection.
        """
        owners: dict[str, int] = {}  # the layer that a projection is borrowed from, by its kind
        deciding: dict[str, ValueRoute] = {}  # the route that borrows it
        for route in self.routes[layer]:
            for kind, owner in route.source(layer)._asdict().items():
                if owner == layer:  # the route borrows none of this kind
                    continue
                if kind in owners and owners[kind] != owner:
                    raise WakefulError(
                        f"{deciding[kind]} and {route} both decide where layer {layer}'s {kind} "
                        "comes from; keep one of them, or give them different layers with on_layers"
                    )
                owners[kind], deciding[kind] = owner, route
        return Source(layer, layer, layer)._replace(**owners)

    def _reads(self, layer: int) -> frozenset[Read]:
        """Return the tensors that this layer reads: the heads that it borrows from other layers,
        and the tensors that its routes read.

        Borrowed queries are read as they are projected, keys and values as they are attended to.
        """
        kinds: tuple[Kind, ...] = ("query", "keys", "values")
        sources = map(Read, kinds, self.sources[layer])
        borrowed = frozenset(read for read in sources if read.layer != layer)
        return borrowed.union(*(route.reads(layer) for route in self.routes[layer]))

    def _check(self, layer: int) -> None:
        """Raise `WakefulError` if this layer borrows heads from a layer that has none of its own,
        its routes contradict each other, or they read a tensor that no earlier layer has.
        """
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
        for read in self.reads[layer] - BEFORE_LAYERS:  # every layer may read the model's input
            if read.layer >= layer or read.layer < 0:
                raise WakefulError(f"layer {layer} cannot read {read.kind} of layer {read.layer}")
            if read.kind in ("query", "key", "value") and not self.owns(read.kind, read.layer):
                raise WakefulError(
                    f"layer {layer} reads the {read.kind} of layer {read.layer}, which has no "
                    f"{read.kind} projection of its own"
                )
