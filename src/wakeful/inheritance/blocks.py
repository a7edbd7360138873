"""A smaller decoder with the weights of a larger one (When Attention Collapses, algorithm 1).

Block t of the target is block `layers.sources[t]` of the reference. The token embedding, learned
positions, final norm and head always come along.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import nn

from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError
from wakeful.inheritance.layers import LayerMap
from wakeful.layer_ranges import format_layers
from wakeful.model.attention import Attention
from wakeful.model.decoder import Decoder, without_matrices
from wakeful.model.initialize import fill, initialize, set_parameter
from wakeful.normalizers.base import Normalizer
from wakeful.norms.base import Norm
from wakeful.paged import Paged

_PROJECTIONS = ("query", "key", "value")
_STORED = {"key": "keys", "value": "values"}
"""The parts of a stored prefix that belong to a projection."""
_ENDS = ("embed", "positions", "embedding", "norm", "head")
"""The parts before and after the blocks."""


def inherit_blocks(
    reference: Decoder,
    layers: LayerMap,
    *,
    route: str = "",
    normalizer: str = "",
    seed: int = 0,
) -> Decoder:
    """Return a decoder of `len(layers)` blocks that starts with the weights of the reference's
    blocks, and with its embedding, final norm and head.

    `route` and `normalizer` (empty: the reference's own) may be other variants; their parameters
    start where they change nothing, if there is such a point: see `departures`. A model that
    divides attention logits by the layer number gets its queries rescaled, so that a block computes
    the same under its new number. `seed` is for parameters that are not inherited.

    Raises:
        WakefulError: the reference lacks a layer, or a layer cannot get another number.
    """
    layers.check(reference.config.num_layers)
    config = target_config(reference.config, layers.sources, route=route, normalizer=normalizer)
    return _assemble(config, reference, layers.sources, seed)


def random_like_heir(
    reference: Decoder,
    sources: Sequence[int],
    *,
    route: str = "",
    normalizer: str = "",
    seed: int = 0,
) -> Decoder:
    """Return a randomly initialized decoder of the shape that an heir with the reference's layers
    `sources` would have. `route` and `normalizer` are the heir's, empty for the reference's own.
    """
    config = target_config(reference.config, sources, route=route, normalizer=normalizer)
    return initialize(Decoder(config).to(reference.head.weight.dtype), seed)


def target_config(
    reference: ModelConfig, sources: Sequence[int], *, route: str = "", normalizer: str = ""
) -> ModelConfig:
    """Return the configuration of a decoder with the reference's layers `sources`, and another
    route or normalizer; the reference's own where they are empty.
    """
    return dataclasses.replace(
        reference.with_layers(sources),
        route=route or reference.route,
        normalizer=normalizer or reference.normalizer,
    )


def departures(
    reference: Decoder, layers: LayerMap, *, route: str = "", normalizer: str = ""
) -> list[str]:
    """Return the reasons, in words, why inherited blocks compute otherwise than in the reference
    before any training; [] if they compute the same.

    `route` and `normalizer` are variants to switch on, "" for the reference's own; many start where
    they change nothing. That the target has fewer blocks is not a reason.
    """
    config = target_config(reference.config, layers.sources, route=route, normalizer=normalizer)
    reasons: list[str] = []
    with without_matrices():
        target = Decoder(config)
    # Where the norms of a layer stand, by its number and the number of layers.
    target_at, reference_at = target.placement.at, reference.placement.at
    pairs, total = [*enumerate(layers.sources)], reference.config.num_layers
    moved_norms = [
        t for t, source in pairs if target_at(t, len(layers)) != reference_at(source, total)
    ]
    if moved_norms:
        reasons.append(
            f"model.placement = {config.placement} goes by a layer's number: the norms of the "
            f"target's layers {format_layers(moved_norms)} stand elsewhere than they did"
        )
    if config.route != reference.config.route:
        # It returns a reason, "" if the route can start where it changes nothing.
        reasons.append(target.route.start_plain())
        if reference.config.route != "own":  # "own" is the plain route, in which nothing is lost
            reasons.append(f"the reference's own route {reference.config.route} is gone")
        for kind in _PROJECTIONS:
            owned = [t for t, source in pairs if reference.plan.owns(kind, source)]
            lost = [t for t in owned if not target.plan.owns(kind, t)]
            if lost:
                reasons.append(
                    f"{kind} projections of the target's layers {format_layers(lost)} are lost"
                )
    if config.normalizer != reference.config.normalizer:
        reasons.append(_normalizers(target)[0].start_plain())  # all layers have the same one
        if reference.config.normalizer != "softmax":
            reasons.append(f"the reference's own normalizer {reference.config.normalizer} is gone")
    return [text for text in reasons if text]


@torch.no_grad()
def _assemble(
    config: ModelConfig, reference: Decoder, sources: Sequence[int], seed: int
) -> Decoder:
    """Return a decoder whose block t has the weights of the reference's block `sources[t]`; weights
    that the reference lacks are random, by `seed`.
    """
    # Matrices are on the meta device until they are copied, or filled at the end.
    with without_matrices():
        target = Decoder(config).to(reference.head.weight.dtype)
    initialize(target, seed)
    for part in _ENDS:
        if hasattr(target, part):
            _copy_part(target, part, getattr(reference, part))
    _start_variants(target, reference, sources)
    for layer, source in enumerate(sources):
        _copy_block(target, layer, reference, source)
    return fill(target, seed)


def _copy_part(target: Decoder, name: str, reference_part: nn.Module) -> None:
    """Copy the weights of a reference's part into the target's part `name`.

    A weight of the target that is on the meta device gets memory first, unless the reference's is
    on the meta device too, as when a recipe is checked. A weight that the reference still has in
    its file (`Paged`) is shared, not copied.
    """
    part, state = target.get_submodule(name), dict(reference_part.state_dict())
    for inner, parameter in list(part.named_parameters()):
        reference_weight = reference_part.get_parameter(inner)
        if parameter.is_meta and isinstance(reference_weight, Paged):
            set_parameter(target, f"{name}.{inner}", reference_weight.detach())
        elif parameter.is_meta and not reference_weight.is_meta:
            set_parameter(target, f"{name}.{inner}", torch.empty_like(parameter, device="cpu"))
    shared = [inner for inner, weight in part.named_parameters() if isinstance(weight, Paged)]
    to_copy = {inner: tensor for inner, tensor in state.items() if inner not in shared}
    part.load_state_dict(to_copy, strict=not shared)  # shared weights are missing from `to_copy`


def _start_variants(target: Decoder, reference: Decoder, sources: Sequence[int]) -> None:
    """Start the target's route, depth mix and normalizers where they change nothing. Some have no
    such point; `departures` says so.

    A route or depth mix that the reference has too starts as in the reference's layers `sources`.
    """
    target.route.start_plain()
    target.depth.start_plain()
    if target.config.route == reference.config.route:
        target.route.take_over(reference.route, sources)
    if target.config.depth == reference.config.depth:
        target.depth.take_over(reference.depth, sources)
    for normalizer in _normalizers(target):
        normalizer.start_plain()


def _normalizers(part: nn.Module) -> list[Normalizer]:
    return [module for module in part.modules() if isinstance(module, Normalizer)]


def _copy_block(target: Decoder, layer: int, reference: Decoder, source: int) -> None:
    """Copy block `source` of the reference to block `layer` of the target, with its attention
    logits as they were and with what a norm keeps besides its weights.
    """
    for name, part in target.blocks[layer].named_children():
        if isinstance(part, Attention):
            _copy_attention(target, layer, reference, source)
            _keep_logits(target, layer, source)
        else:
            reference_part = reference.blocks[source].get_submodule(name)
            _copy_part(target, f"blocks.{layer}.{name}", reference_part)
            if isinstance(part, Norm) and isinstance(reference_part, Norm):
                part.take_over(reference_part)


def _copy_attention(target: Decoder, layer: int, reference: Decoder, source: int) -> None:
    """Copy the attention of the reference's layer `source` to the target's layer `layer`.

    A projection that the reference's layer borrows from another layer is copied from that one, and
    so are the keys and values of a stored prefix. Normalizers are copied if both models have the
    same kind.
    """
    path = f"blocks.{layer}.attention"
    attention = target.get_submodule(path)
    for kind in _PROJECTIONS:
        owner = getattr(reference.plan.sources[source], kind)  # the layer that has the projection
        owner_attention = reference.blocks[owner].get_submodule("attention")
        if target.plan.owns(kind, layer):
            _copy_part(target, f"{path}.{kind}", owner_attention.get_submodule(kind))
            if target.config.stored_prefix and kind in _STORED:
                name = f"stored.{_STORED[kind]}"
                attention.get_parameter(name).copy_(owner_attention.get_parameter(name))
    reference_attention = reference.blocks[source].get_submodule("attention")
    _copy_part(target, f"{path}.out", reference_attention.get_submodule("out"))
    if target.config.normalizer == reference.config.normalizer:
        for normalizer, reference_normalizer in zip(
            _normalizers(attention), _normalizers(reference_attention), strict=True
        ):
            normalizer.load_state_dict(reference_normalizer.state_dict())


def _keep_logits(target: Decoder, layer: int, source: int) -> None:
    """Rescale in place the queries of a layer that was copied from layer `source` of the reference,
    so that its attention logits stay the same.

    Only a model that divides logits by (layer number + 1) needs that, if the number has changed.

    Raises:
        WakefulError: other layers use these queries too.
    """
    if not target.config.scale_logits_by_layer or source == layer:
        return
    read_kinds = {read.kind for reads in target.plan.reads for read in reads}
    mixes_queries = any("query" in route.mixes for routes in target.plan.routes for route in routes)
    # Queries are shared if other layers read them, a route mixes them, or they are borrowed here.
    if "query" in read_kinds or mixes_queries or not target.plan.owns("query", layer):
        raise WakefulError(
            f"layer {source} cannot become layer {layer}: model.scale_logits_by_layer divides "
            f"its logits by another number there, and the route {target.config.route} shares "
            "queries, so that rescaling them would change other layers"
        )
    query = target.blocks[layer].get_submodule("attention.query")
    # A query is proportional to the scale of its norm, or, where no norm has one, to its weight and
    # bias together.
    for tensor in list(query.get_submodule("norm").parameters()) or query.parameters():
        tensor.mul_((layer + 1) / (source + 1))
