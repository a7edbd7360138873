"""A smaller decoder with the weights of a larger one (When Attention Collapses, algorithm 1).

Block t of the target is block `layers.sources[t]` of the reference. The token embedding, learned
positions, final norm and head always come along.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, get_args

import torch
from torch import nn

from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError
from wakeful.inheritance.layers import LayerMap
from wakeful.inheritance.options import Copy
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


class Donor(NamedTuple):
    """A block to copy from: the parts `copy` of layer `layer` of `decoder`."""

    decoder: Decoder
    layer: int
    copy: Copy = "all"


def inherit_blocks(
    reference: Decoder,
    layers: LayerMap,
    *,
    copy: Copy = "all",
    route: str = "",
    normalizer: str = "",
    seed: int = 0,
) -> Decoder:
    """Return a decoder of `len(layers)` blocks that starts from the reference's.

    `route` and `normalizer` (empty: the reference's own) may be other variants; what they add
    starts where it changes nothing, if there is such a point: see `departures`. A model whose
    logits are divided by the layer number gets its queries rescaled, so that a block computes at
    its new place what it computed at the old. `seed` is for what is not inherited.

    Raises:
        WakefulError: the reference has no such layer, or what it has cannot be moved.
    """
    layers.check(reference.config.num_layers)
    config = target_config(reference.config, layers.sources, route=route, normalizer=normalizer)
    donors = [Donor(reference, source, copy) for source in layers.sources]
    return _assembled(
        config, reference, donors, ends=copy != "blocks", variants=[donors], seed=seed
    )


def grow(
    student: Decoder,
    student_layers: LayerMap,
    reference: Decoder,
    layers: LayerMap,
    *,
    copy: Copy = "all",
    seed: int = 0,
) -> Decoder:
    """Return the student with more blocks: those it has stay trained, new ones are inherited.

    `student_layers` says which reference layers the student's blocks came from; `layers` must hold
    all of them. Embedding, positions, final norm and head are the student's. Where route or depth
    mix are the reference's too, new blocks bring what it learned of them.

    Raises:
        WakefulError: `layers` drops a block of the student, or the reference lacks one.
    """
    layers.check(reference.config.num_layers)
    lost = sorted(set(student_layers.sources) - set(layers.sources))
    if lost or len(set(layers.sources)) < len(layers):
        raise WakefulError(
            f"a student of the layers {list(student_layers.sources)} cannot grow to "
            f"{list(layers.sources)}: each must be there once"
        )
    config = dataclasses.replace(
        student.config,
        num_layers=len(layers),
        local_layers=reference.config.with_layers(layers.sources).local_layers,
    )
    place = {source: layer for layer, source in enumerate(student_layers.sources)}
    donors = [
        Donor(student, place[source]) if source in place else Donor(reference, source, copy)
        for source in layers.sources
    ]
    kept = [donor if donor.decoder is student else Donor(student, -1) for donor in donors]
    # All layers are some of the reference's: its routes read earlier ones under its own numbers.
    known = [Donor(reference, source) for source in layers.sources]
    return _assembled(config, student, donors, ends=True, variants=[known, kept], seed=seed)


def at_random(
    reference: Decoder,
    sources: Sequence[int],
    *,
    route: str = "",
    normalizer: str = "",
    seed: int = 0,
) -> Decoder:
    """Return a decoder of the shape that an heir of these layers has, with nothing inherited."""
    config = target_config(reference.config, sources, route=route, normalizer=normalizer)
    return initialize(Decoder(config).to(reference.head.weight.dtype), seed)


def target_config(
    reference: ModelConfig, sources: Sequence[int], *, route: str = "", normalizer: str = ""
) -> ModelConfig:
    """Return the configuration of the reference's layers `sources`, route and normalizer changed.

    Both are the reference's own where they are empty.
    """
    return dataclasses.replace(
        reference.with_layers(sources),
        route=route or reference.route,
        normalizer=normalizer or reference.normalizer,
    )


def departures(
    reference: Decoder, layers: LayerMap, *, route: str = "", normalizer: str = ""
) -> list[str]:
    """Return the reasons why inherited blocks compute otherwise, before any training.

    Empty where a route or normalizer that is switched on starts at a point where it changes
    nothing. That the target has fewer blocks is not among them.
    """
    config = target_config(reference.config, layers.sources, route=route, normalizer=normalizer)
    with without_matrices():
        fresh, found = Decoder(config), [""]
    where, theirs = fresh.placement.at, reference.placement.at
    ours, total = [*enumerate(layers.sources)], reference.config.num_layers
    moved = [t for t, source in ours if where(t, len(layers)) != theirs(source, total)]
    if moved:
        found.append(
            f"model.placement = {config.placement} goes by a layer's number: the norms of the "
            f"target's layers {format_layers(moved)} stand elsewhere than they did"
        )
    if config.route != reference.config.route:
        found.append(fresh.route.start_plain())
        if reference.config.route != "own":
            found.append(f"the reference's own route {reference.config.route} is gone")
        for kind in _PROJECTIONS:
            owned = [t for t, source in ours if reference.plan.owns(kind, source)]
            lost = [t for t in owned if not fresh.plan.owns(kind, t)]
            if lost:
                found.append(
                    f"{kind} projections of the target's layers {format_layers(lost)} are lost"
                )
    if config.normalizer != reference.config.normalizer:
        found.append(_normalizers(fresh)[0].start_plain())
        if reference.config.normalizer != "softmax":
            found.append(f"the reference's own normalizer {reference.config.normalizer} is gone")
    return [text for text in found if text]


@torch.no_grad()
def _assembled(
    config: ModelConfig,
    base: Decoder,
    donors: Sequence[Donor],
    *,
    ends: bool,
    variants: Sequence[Sequence[Donor]],
    seed: int,
) -> Decoder:
    """Return a decoder with what stands around the blocks from `base`, if `ends`, and blocks from
    their donors; for `variants` see `_start_variants`.
    """
    if unknown := {donor.copy for donor in donors}.difference(get_args(Copy)):
        raise WakefulError(
            f"copy must be one of {', '.join(get_args(Copy))}, got {unknown.pop()!r}"
        )
    with without_matrices():
        target = Decoder(config).to(base.head.weight.dtype)
    initialize(target, seed)
    for part in _ENDS if ends else ():
        if hasattr(target, part):
            _copy_part(target, part, getattr(base, part))
    _start_variants(target, variants)
    for layer, donor in enumerate(donors):
        _copy_block(target, layer, donor)
    return fill(target, seed)


def _copy_part(target: Decoder, name: str, theirs: nn.Module) -> None:
    """Copy the weights of a part into the target's, which are made where it has none yet.

    A donor without memory, which is inherited from to check a recipe, leaves them unmade; one whose
    weights stay in their files shares them.
    """
    part, state = target.get_submodule(name), dict(theirs.state_dict())
    for inner, parameter in list(part.named_parameters()):
        there = theirs.get_parameter(inner)
        if parameter.is_meta and isinstance(there, Paged):
            set_parameter(target, f"{name}.{inner}", there.detach())
        elif parameter.is_meta and not there.is_meta:
            set_parameter(target, f"{name}.{inner}", torch.empty_like(parameter, device="cpu"))
    shared = [inner for inner, made in part.named_parameters() if isinstance(made, Paged)]
    part.load_state_dict(
        {n: each for n, each in state.items() if n not in shared}, strict=not shared
    )


def _start_variants(target: Decoder, known: Sequence[Sequence[Donor]]) -> None:
    """Start the route, depth mix and normalizers where they change nothing, or where they were.

    Each of `known` has a donor for every layer, all of one decoder, −1 where that lacks the layer;
    what a later one knows counts.
    """
    target.route.start_plain()
    target.depth.start_plain()
    for donors in known:
        theirs, sources = donors[0].decoder, [donor.layer for donor in donors]
        if target.config.route == theirs.config.route:
            target.route.take_over(theirs.route, sources)
        if target.config.depth == theirs.config.depth:
            target.depth.take_over(theirs.depth, sources)
    for normalizer in _normalizers(target):
        normalizer.start_plain()


def _normalizers(part: nn.Module) -> list[Normalizer]:
    return [module for module in part.modules() if isinstance(module, Normalizer)]


def _copy_block(target: Decoder, layer: int, donor: Donor) -> None:
    """Copy the halves that `donor.copy` names, each with the norms that stand around it."""
    copy = donor.copy
    for name, part in target.blocks[layer].named_children():
        half = name.partition("_")[0]
        if copy not in ("all", "blocks", half) and not (copy == "without_norms" and name == half):
            continue
        if isinstance(part, Attention):
            _copy_attention(target, layer, donor)
            _keep_logits(target, layer, donor)
        else:
            theirs = donor.decoder.blocks[donor.layer].get_submodule(name)
            _copy_part(target, f"blocks.{layer}.{name}", theirs)
            if isinstance(part, Norm) and isinstance(theirs, Norm):
                part.take_over(theirs)


def _copy_attention(target: Decoder, layer: int, donor: Donor) -> None:
    """Copy one layer's attention; a projection that it borrows comes from where it does.

    So do the keys and values of a stored prefix, which stay what the reference's layer saw.
    """
    place = f"blocks.{layer}.attention"
    ours = target.get_submodule(place)
    for kind in _PROJECTIONS:
        owner = getattr(donor.decoder.plan.sources[donor.layer], kind)
        theirs = donor.decoder.blocks[owner].get_submodule("attention")
        if target.plan.owns(kind, layer):
            _copy_part(target, f"{place}.{kind}", theirs.get_submodule(kind))
            if target.config.stored_prefix and kind in _STORED:
                name = f"stored.{_STORED[kind]}"
                ours.get_parameter(name).copy_(theirs.get_parameter(name))
    theirs = donor.decoder.blocks[donor.layer].get_submodule("attention")
    _copy_part(target, f"{place}.out", theirs.get_submodule("out"))
    if target.config.normalizer == donor.decoder.config.normalizer:
        for own, other in zip(_normalizers(ours), _normalizers(theirs), strict=True):
            own.load_state_dict(other.state_dict())


def _keep_logits(target: Decoder, layer: int, donor: Donor) -> None:
    """Undo what a new layer number does to attention logits that are divided by it."""
    if not target.config.scale_logits_by_layer or donor.layer == layer:
        return
    asks = {read.kind for reads in target.plan.reads for read in reads}
    mixed = any("query" in route.mixes for routes in target.plan.routes for route in routes)
    if "query" in asks or mixed or not target.plan.owns("query", layer):
        raise WakefulError(
            f"layer {donor.layer} cannot become layer {layer}: model.scale_logits_by_layer divides "
            f"its logits by another number there, and the route {target.config.route} shares "
            "queries, so that rescaling them would change other layers"
        )
    query = target.blocks[layer].get_submodule("attention.query")
    # A query is proportional to its norm's scale, or else to all of its parameters.
    for tensor in list(query.get_submodule("norm").parameters()) or query.parameters():
        tensor.mul_((layer + 1) / (donor.layer + 1))
