"""Inheriting blocks: known answers, moved blocks, variants switched on, and what is refused."""

import dataclasses

import pytest
import torch
from torch import Tensor

from helpers import EXAMPLES, FIELD, some_tokens, tiny_config, tiny_decoder
from wakeful.errors import WakefulError
from wakeful.inheritance.blocks import departures, inherit_blocks, target_config
from wakeful.inheritance.layers import LayerMap, first, named_layers
from wakeful.model.decoder import Decoder
from wakeful.routes import Source, ValueRoute
from wakeful.surgery import store_prefix

TOKENS = some_tokens(2, 13)
TWICE, LAST = LayerMap((0, 1, 0, 1), "named"), LayerMap((2, 3), "named")


def own_parameter(name: str) -> bool:
    return name.startswith(("route.", "depth.")) or ".normalizer." in name


@pytest.mark.parametrize(("folder", "expression"), EXAMPLES, ids=[e for _, e in EXAMPLES])
def test_all_layers_inherited_are_the_reference_itself(folder: str, expression: str) -> None:
    reference = tiny_decoder(**{FIELD[folder]: expression})
    heir = inherit_blocks(reference, first(4, of=4))
    assert torch.equal(heir(TOKENS), reference(TOKENS))
    assert all(p.requires_grad for p in heir.parameters())
    shared = {p.data_ptr() for p in heir.parameters()} & {
        p.data_ptr() for p in reference.parameters()
    }
    assert not shared


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_an_heir_computes_the_first_blocks(positions: str, tied: bool) -> None:
    reference = tiny_decoder(positions=positions, tied=tied, bias=True, norm="layernorm")
    heir = inherit_blocks(reference, first(2, of=4))
    cut = tiny_decoder(positions=positions, tied=tied, bias=True, norm="layernorm")
    cut.blocks = cut.blocks[:2]
    assert torch.equal(heir(TOKENS), cut(TOKENS))
    assert (heir.head.weight is heir.embed.weight) == tied


@pytest.mark.parametrize("route", ["own", "resformer", "svformer", "cla"])
def test_a_stored_prefix_comes_along(route: str) -> None:
    reference = store_prefix(tiny_decoder(route=route, num_kv_heads=2), [3, 4])
    assert torch.equal(inherit_blocks(reference, first(4, of=4))(TOKENS), reference(TOKENS))
    later = inherit_blocks(reference, LayerMap((1, 3), "named"))
    for layer, source in enumerate((1, 3)):
        for kind, owner in (("key", "keys"), ("value", "values")):
            if later.plan.owns(kind, layer):
                origin = getattr(reference.plan.sources[source], kind)
                expected = reference.get_parameter(f"blocks.{origin}.attention.stored.{owner}")
                actual = later.get_parameter(f"blocks.{layer}.attention.stored.{owner}")
                assert torch.equal(actual, expected)
                assert expected.abs().max() > 0


@pytest.mark.parametrize("sources", [(1, 3), (3, 1), (0, 1, 0, 1), (2,)])
def test_any_blocks_in_any_order(sources: tuple[int, ...]) -> None:
    reference = tiny_decoder()
    heir = inherit_blocks(reference, LayerMap(sources, "named"))
    moved = tiny_decoder()
    moved.blocks = torch.nn.ModuleList(reference.blocks[source] for source in sources)
    assert torch.equal(heir(TOKENS), moved(TOKENS))


@pytest.mark.parametrize("sources", [(1, 3), (0, 1, 0, 1)])
def test_norms_divided_by_the_layer_number_are_compensated(sources: tuple[int, ...]) -> None:
    reference = tiny_decoder(norm="layernorm_scaling")
    heir = inherit_blocks(reference, LayerMap(sources, "named"))
    moved = tiny_decoder(norm="layernorm_scaling")
    moved.blocks = torch.nn.ModuleList(reference.blocks[source] for source in sources)
    torch.testing.assert_close(heir(TOKENS), moved(TOKENS), rtol=0, atol=1e-11)


@pytest.mark.parametrize("sources", [(1, 3), (3, 1), (0, 1, 0, 1)])
@pytest.mark.parametrize("bias", [False, True])
def test_logits_divided_by_the_layer_number_are_compensated(
    sources: tuple[int, ...], bias: bool
) -> None:
    reference = tiny_decoder(scale_logits_by_layer=True, bias=bias)
    heir = inherit_blocks(reference, LayerMap(sources, "named"))
    moved = tiny_decoder(scale_logits_by_layer=True, bias=bias)
    # The reference's own blocks keep the scale of their old number.
    moved.blocks = torch.nn.ModuleList(reference.blocks[source] for source in sources)
    torch.testing.assert_close(heir(TOKENS), moved(TOKENS), rtol=1e-12, atol=1e-12)


class SharedQueries(ValueRoute):
    """All layers use the first layer's queries."""

    def source(self, layer: int) -> Source:
        return Source(query=0, key=layer, value=layer)


def test_compensation_that_would_touch_other_layers_is_refused() -> None:
    reference = tiny_decoder(scale_logits_by_layer=True, route=str(SharedQueries()))
    inherit_blocks(reference, first(3, of=4))
    with pytest.raises(WakefulError, match="cannot become layer"):
        inherit_blocks(reference, named_layers([0, 2, 3], of=4))


@pytest.mark.parametrize(
    "route",
    [
        'resformer(mode="learnable")',
        'on_layers([1, 2], resformer(mode="learnable"))',
    ],
)
def test_a_route_with_a_plain_point_changes_nothing_at_step_0(route: str) -> None:
    reference = tiny_decoder()
    plain = inherit_blocks(reference, first(3, of=4))
    heir = inherit_blocks(reference, first(3, of=4), route=route)
    torch.testing.assert_close(heir(TOKENS), plain(TOKENS), rtol=1e-12, atol=1e-12)
    assert departures(reference, first(3, of=4), route=route) == []
    # And it can leave that point.
    heir.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    gradients = [p.grad for n, p in heir.named_parameters() if n.startswith("route.")]
    assert gradients
    assert all(grad is not None and grad.abs().max() > 0 for grad in gradients)


def test_an_heir_of_one_layer_has_no_later_layer_to_mix() -> None:
    for route in ('resformer(mode="learnable")', "gated", "svformer", "neutreno"):
        heir = inherit_blocks(tiny_decoder(), first(1, of=4), route=route)
        assert torch.equal(heir(TOKENS), inherit_blocks(tiny_decoder(), first(1, of=4))(TOKENS))


def test_the_learned_weights_start_at_zero_and_one() -> None:
    heir = inherit_blocks(tiny_decoder(), first(3, of=4), route='resformer(mode="learnable")')
    assert heir.route.get_parameter("weights").tolist() == [[0.0, 1.0], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("options", "far"),
    [
        ({"route": "gated"}, 0.05),
        ({"route": "output_gate"}, 0.05),
        ({"route": 'gated(gate="relu")'}, 0.05),
        ({"route": 'gated(gate="mix")'}, 0.05),
        ({"normalizer": "softmax1(learned=True)"}, 0.05),
    ],
)
def test_variants_without_a_plain_point_start_near_it_and_say_so(options: dict, far: float) -> None:
    reference = tiny_decoder(init_std=0.2, noise=0.05)
    plain = inherit_blocks(reference, first(3, of=4))(TOKENS)
    heir = inherit_blocks(reference, first(3, of=4), **options)
    distance = (heir(TOKENS) - plain).abs().max()
    assert 0 < distance < far
    (message,) = departures(reference, first(3, of=4), **options)
    assert "cannot learn" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"route": "svformer"}, "value projections of the target's layers 1–2 are lost"),
        ({"route": "cla"}, "key projections of the target's layers 1 are lost"),
        ({"route": "neutreno"}, "neutreno changes what plain blocks compute"),
        ({"route": "resformer"}, "resformer changes what plain blocks compute"),
        ({"route": "differential"}, "differential changes what plain blocks compute"),
        ({"route": 'resformer(mode="plus")'}, "changes what plain blocks compute"),
        ({"normalizer": "softmax1"}, "softmax1 takes a share from every weight"),
    ],
)
def test_what_cannot_start_unchanged_is_named(options: dict, message: str) -> None:
    reference = tiny_decoder()
    assert any(message in text for text in departures(reference, first(3, of=4), **options))
    heir = inherit_blocks(reference, first(3, of=4), **options)
    assert not torch.allclose(heir(TOKENS), inherit_blocks(reference, first(3, of=4))(TOKENS))


def test_norms_that_stand_elsewhere_in_a_smaller_model_are_named() -> None:
    reference = tiny_decoder(placement="mixed(share=0.5)")
    (message,) = departures(reference, LayerMap((0, 1, 3), "named"))
    assert "norms of the target's layers 1 stand elsewhere" in message
    assert departures(reference, LayerMap((0, 3), "named")) == []


def test_svformer_heirs_have_one_value_projection() -> None:
    heir = inherit_blocks(tiny_decoder(), first(3, of=4), route="svformer")
    names = [name for name, _ in heir.named_parameters() if ".value." in name]
    assert names == ["blocks.0.attention.value.weight"]


def test_neutral_settings_are_no_departure() -> None:
    reference = tiny_decoder()
    for options in ({"route": "neutreno(lam=0.0)"}, {"route": "cla(group=1)"},
                    {"route": "gated(start=-40.0)"},
                    {"normalizer": "softmax1(learned=True, start=-1e9)"}):  # fmt: skip
        assert departures(reference, first(2, of=4), **options) == []


def test_a_reference_with_a_variant_passes_on_what_it_learned() -> None:
    learned = 'resformer(mode="learnable")'
    reference = tiny_decoder(route=learned, normalizer="softmax1(learned=True)")
    heir = inherit_blocks(reference, named_layers([0, 2, 3], of=4))
    expected = reference.route.get_parameter("weights")
    assert torch.equal(heir.route.get_parameter("weights"), expected[[1, 2]])
    sinks = "blocks.{}.attention.dot.normalizer.log_sinks"
    assert torch.equal(
        heir.get_parameter(sinks.format(1)), reference.get_parameter(sinks.format(2))
    )
    # A block that was first in the reference has no row; it starts plain.
    twice = inherit_blocks(reference, TWICE)
    assert twice.route.get_parameter("weights")[1].tolist() == [0.0, 1.0]
    changes = departures(reference, first(2, of=4), route="own", normalizer="softmax")
    assert len(changes) == 2
    assert all("is gone" in text for text in changes)


def test_value_embeddings_start_at_zero_and_stay_where_they_were() -> None:
    plain, route = tiny_decoder(), "value_embedding"
    heir = inherit_blocks(plain, first(3, of=4), route=route)
    assert torch.equal(heir(TOKENS), inherit_blocks(plain, first(3, of=4))(TOKENS))
    heir.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    tables = [heir.get_parameter(f"route.tables.{layer}.weight") for layer in (0, 2)]
    assert all(table.grad is not None and table.grad.abs().max() > 0 for table in tables)
    reference = tiny_decoder(route=route)
    for part in ("tables", "gates"):
        name = f"route.{part}.1.weight"
        inherited = inherit_blocks(reference, first(2, of=4)).get_parameter(name)
        assert torch.equal(inherited, reference.get_parameter(name))
    with pytest.raises(WakefulError, match=r"gives layer 1 no table, and the layer 1"):
        inherit_blocks(reference, first(3, of=4))


def test_what_depends_on_the_layers_number_stays_there() -> None:
    reference = tiny_decoder(route="differential")
    heir = inherit_blocks(reference, first(3, of=4))
    vectors = reference.get_parameter("route.vectors")
    assert torch.equal(heir.get_parameter("route.vectors"), vectors[:3])
    with pytest.raises(WakefulError, match=r"layer 1 cannot inherit what layer 2 has learned"):
        inherit_blocks(reference, named_layers([0, 2, 3], of=4))


def test_plus_keeps_every_kept_layers_weight() -> None:
    reference = tiny_decoder(route='resformer(mode="plus")')
    heir = inherit_blocks(reference, named_layers([0, 1, 3], of=4))
    total, share = (reference.route.get_parameter(name) for name in ("total", "share"))
    weights = total * share.softmax(0)
    total, share = (heir.route.get_parameter(name) for name in ("total", "share"))
    torch.testing.assert_close(total * share.softmax(0), weights[[0, 2]])
    with pytest.raises(WakefulError, match="no share in the reference"):
        inherit_blocks(reference, TWICE)


def test_denseformer_weights_follow_their_layers() -> None:
    former = tiny_decoder(depth="denseformer")
    smaller = inherit_blocks(former, first(2, of=4))
    assert torch.equal(
        smaller.depth.get_parameter("weights.2"), former.depth.get_parameter("weights.2")
    )
    with pytest.raises(WakefulError, match="only the first layers"):
        inherit_blocks(former, LAST)


def by_number(decoder: Decoder) -> dict[tuple[str, int, str], Tensor]:
    """Return what the route and depth mix have of each number; rows of a vector count as well."""
    actual: dict[tuple[str, int, str], Tensor] = {}
    for name, parameter in decoder.named_parameters():
        if own_parameter(name):
            _, kind, *number = name.split(".", 3)
            if number:
                actual[kind, int(number[0]), ".".join(number[1:])] = parameter
            else:
                actual |= {(kind, row, ""): weights for row, weights in enumerate(parameter)}
    return actual


LAYERS = {0: 0, 1: 2, 2: 3}
SUBLAYERS = {0: 0, 1: 1, 2: 4, 3: 5, 4: 6, 5: 7}


@pytest.mark.parametrize(
    ("options", "places"),
    [
        ({"depth": "hyper_connections"}, SUBLAYERS),
        ({"depth": "hyper_connections(streams=3, dynamic=False)"}, SUBLAYERS),
        ({"route": "gated"}, {1: 2, 2: 3}),
        ({"route": 'gated(gate="relu")'}, {1: 2, 2: 3}),
        ({"route": "output_gate"}, LAYERS),
        ({"route": 'output_gate(per="channel")'}, LAYERS),
        ({"route": "value_embedding(every=1)"}, LAYERS),
    ],
)
def test_what_each_layer_has_of_a_variant_comes_from_its_source(
    options: dict, places: dict[int, int]
) -> None:
    reference = tiny_decoder(**options)
    expected = by_number(reference)
    heir = by_number(inherit_blocks(reference, named_layers([0, 2, 3], of=4)))
    assert {number for _, number, _ in heir} == set(places)
    for (kind, number, rest), tensor in heir.items():
        assert torch.equal(tensor, expected[kind, places[number], rest]), (kind, number, rest)


def test_mudd_keeps_what_sums_as_many_blocks() -> None:
    reference = tiny_decoder(depth="mudd")
    heir = inherit_blocks(reference, first(2, of=4))
    for part in ("into.1.weight", "out.1", "fixed.1"):
        name = f"depth.{part}"
        assert torch.equal(heir.get_parameter(name), reference.get_parameter(name))
    # After a last block there is one way instead of four: its weights start anew.
    one_hot = torch.zeros(1, 3, dtype=torch.float64)
    one_hot[:, 2] = 1.0
    assert torch.equal(heir.get_parameter("depth.fixed.2"), one_hot)
    out = heir.get_parameter("depth.out.2")
    assert out.shape == (3, 3)
    assert not out.any()
    for layers in (LAST, named_layers([0, 2, 3], of=4)):
        with pytest.raises(WakefulError, match="only the first layers"):
            inherit_blocks(reference, layers)


def test_a_borrowed_projection_is_inherited_from_its_owner() -> None:
    reference = tiny_decoder(route="svformer")
    heir = inherit_blocks(reference, LAST)
    value = "blocks.0.attention.value.weight"
    assert torch.equal(heir.get_parameter(value), reference.get_parameter(value))


def test_what_is_refused() -> None:
    reference = tiny_decoder()
    with pytest.raises(WakefulError, match="wants layer 9"):
        inherit_blocks(reference, LayerMap((0, 9), "named"))
    with pytest.raises(WakefulError, match="unknown route"):
        inherit_blocks(reference, first(2, of=4), route="resfomer")
    with pytest.raises(WakefulError, match="the model has the layers"):
        inherit_blocks(reference, first(2, of=4), route="on_layers([3], resformer)")


def test_the_targets_configuration_is_the_references() -> None:
    config = tiny_config(tied=True)
    assert target_config(config, (0, 2)) == dataclasses.replace(config, num_layers=2)
    assert isinstance(inherit_blocks(tiny_decoder(tied=True), first(2, of=4)), Decoder)
