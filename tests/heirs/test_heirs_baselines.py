"""Baselines: what each starts from."""

from typing import Any

import pytest
import torch

from helpers import some_tokens, tiny_decoder
from wakeful.errors import WakefulError
from wakeful.heirs.baselines import (
    BASELINES,
    Baseline,
    Setting,
    baseline_of,
    check_baselines,
    half_width,
    narrow_shares,
)
from wakeful.heirs.inherit import inherit
from wakeful.heirs.layers import LayerMap, first, last
from wakeful.heirs.narrow import narrow
from wakeful.model.decoder import Decoder
from wakeful.model.initialize import initialize

TOKENS = some_tokens(2, 13)


def setting(reference: Decoder, depth: int = 3, **options: Any) -> Setting:
    layers = first(depth, of=reference.config.num_layers)
    return Setting(
        reference, layers, seed=5, lazy=last(depth, of=reference.config.num_layers),
        narrowed=lambda width, **_: narrow(reference, width, TOKENS), **options,
    )  # fmt: skip


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("route", ["", "svformer"])
def test_every_baseline_makes_a_model_that_trains(name: str, route: str) -> None:
    given = setting(tiny_decoder(), route=route)
    decoder = BASELINES[name].start(given)
    assert decoder.config.route == (route or "own")
    assert decoder.config.vocab_size == 29
    decoder.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    second = BASELINES[name].second
    if second is not None:
        decoder = second(given, decoder)
        decoder.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    expected = 4 if name in ("half_width", "half_heads", "narrow", "reference") else 3
    assert decoder.config.num_layers == expected
    if second is None:  # what is timed in its place has its shape
        assert BASELINES[name].stand_in(given).config == decoder.config


def test_random_is_a_model_of_its_own_seed() -> None:
    decoder = BASELINES["random"].start(setting(tiny_decoder()))
    again = initialize(Decoder(decoder.config).double(), 5)
    for name, tensor in decoder.named_parameters():
        assert torch.equal(tensor, again.get_parameter(name))


def test_blocks_alone_differ_from_random_in_their_blocks_alone() -> None:
    given = setting(tiny_decoder(num_layers=6), 2)
    random = BASELINES["random"].start(given)
    places = {"blocks": 0, "middle_blocks": 2, "last_blocks": 4}
    for name, place in places.items():
        decoder = BASELINES[name].start(given)
        for layer, block in enumerate(decoder.blocks):
            for part, tensor in block.named_parameters():
                theirs = given.reference.blocks[place + layer].get_parameter(part)
                assert torch.equal(tensor, theirs), name
        ends = [part for part, _ in decoder.named_parameters() if not part.startswith("blocks.")]
        assert {part.partition(".")[0] for part in ends} >= {"embed", "head"}
        for part in ends:
            assert torch.equal(decoder.get_parameter(part), random.get_parameter(part)), name


def test_stacking_copies_the_trained_half_onto_itself() -> None:
    given = setting(tiny_decoder())
    half = BASELINES["stacking"].start(given)
    assert half.config.num_layers == 2
    stack = BASELINES["stacking"].second
    assert stack is not None
    stacked = stack(given, half)
    for layer, source in enumerate((0, 1, 0)):
        for name, tensor in stacked.blocks[layer].named_parameters():
            assert torch.equal(tensor, half.blocks[source].get_parameter(name))
    hybrid = BASELINES["hybrid_stacking"].start(given)
    for layer, source in enumerate((0, 1, 0)):
        for name, tensor in hybrid.blocks[layer].named_parameters():
            assert torch.equal(tensor, given.reference.blocks[source].get_parameter(name))


def test_narrow_has_all_layers_and_the_heirs_number_of_parameters() -> None:
    reference = tiny_decoder(num_layers=6, num_heads=8, num_kv_heads=4, width=16, mlp_width=96)
    for depth in (2, 3, 5):
        given = setting(reference, depth)
        shares = narrow_shares(given)
        decoder = BASELINES["narrow"].start(given)
        config = decoder.config
        assert (config.num_layers, config.width) == (6, 16)
        size = config.shape
        assert (size.num_kv_heads, size.num_heads) == (4 * shares.heads, 8 * shares.heads)
        assert config.mlp_width == round(96 * shares.mlp)
        assert abs(shares.heads - shares.mlp) < 1 / 4  # of either as much as of the other
        heir = given.inherit(given.layers).num_parameters()["total"]
        left = heir - decoder.num_parameters()["total"]
        assert 0 <= left < 6 * 3 * 16  # less than a channel more in each layer
        plain = narrow(reference, shares, TOKENS)
        for name, tensor in decoder.named_parameters():
            assert torch.equal(tensor, plain.get_parameter(name))


def test_narrow_is_refused_where_the_numbers_do_not_allow_it() -> None:
    with pytest.raises(WakefulError, match="the heir has all layers"):
        narrow_shares(setting(tiny_decoder(), 4))
    one_group = tiny_decoder(num_heads=4, num_kv_heads=1, mlp_width=8)
    with pytest.raises(WakefulError, match=r"4 layers of one group .* the heir has [\d,]+: keep"):
        narrow_shares(setting(one_group, 1))
    with pytest.raises(WakefulError, match=r"--width\.heads narrows a model with route = own"):
        narrow_shares(setting(tiny_decoder(route="svformer")))


def test_half_width_keeps_the_first_heads_units_and_channels() -> None:
    reference = tiny_decoder(num_heads=4, num_kv_heads=2, width=16, head_width=8, mlp_width=20)
    narrow = half_width(reference, residual=True)
    shape = narrow.config.shape
    assert (shape.num_heads, shape.num_kv_heads, shape.head_width, shape.width) == (2, 1, 8, 8)
    assert (narrow.config.mlp_width, narrow.config.num_layers) == (10, 4)
    ours, theirs = narrow.blocks[1], reference.blocks[1]
    # Heads 0 and 1 of four, which share key/value head 0 of two: rows 0–15 and 0–7.
    assert torch.equal(
        ours.get_parameter("attention.query.weight"),
        theirs.get_parameter("attention.query.weight")[:16, :8],
    )
    for kind in ("key", "value"):
        assert torch.equal(
            ours.get_parameter(f"attention.{kind}.weight"),
            theirs.get_parameter(f"attention.{kind}.weight")[:8, :8],
        )
    assert torch.equal(
        ours.get_parameter("attention.out.weight"),
        theirs.get_parameter("attention.out.weight")[:8, :16],
    )
    assert torch.equal(
        ours.get_parameter("mlp.down.weight"), theirs.get_parameter("mlp.down.weight")[:8, :10]
    )
    assert torch.equal(narrow.head.weight, reference.head.weight[:, :8])
    assert narrow(TOKENS).shape == (2, 13, 29)


def test_half_heads_drop_the_other_heads_and_units_exactly() -> None:
    reference = tiny_decoder()
    narrow = half_width(reference, residual=False)
    silent = inherit(reference, first(4, of=4))
    with torch.no_grad():
        for block in silent.blocks:
            block.get_parameter("attention.out.weight")[:, 16:] = 0.0
            block.get_parameter("mlp.down.weight")[:, 10:] = 0.0
    torch.testing.assert_close(narrow(TOKENS), silent(TOKENS), rtol=1e-12, atol=1e-12)


def test_odd_heads_are_rounded_up_in_whole_groups() -> None:
    # SmolLM2 has 9 heads of 64 in 3 groups and 576 channels; here at an eighth of its head width.
    reference = tiny_decoder(num_heads=9, num_kv_heads=3, head_width=8, width=71, mlp_width=15)
    shape = half_width(reference, residual=True).config.shape
    assert (shape.num_heads, shape.num_kv_heads, shape.width) == (6, 2, 36)
    assert half_width(reference, residual=True).config.mlp_width == 8


UNEVEN = {"num_heads": 10, "num_kv_heads": 5, "head_width": 8, "width": 15, "mlp_width": 21}
HALVES = {80: 48, 40: 24, 10: 6, 5: 3, 21: 11}
"""Of H d, G d, H, G and the feed-forward units; no other size of such a model is among these."""


@pytest.mark.parametrize("options", [{"tied": True}, {"bias": True, "norm": "layernorm"},
                                     {"positions": "learned"}, {"norm": "rmsnorm_single"},
                                     {"route": 'resformer(mode="learnable")'}, {"route": "gated"},
                                     {"normalizer": "softmax1(learned=True)"}])  # fmt: skip
@pytest.mark.parametrize("residual", [False, True])
def test_half_width_of_every_kind(options: dict, residual: bool) -> None:
    reference = tiny_decoder(**UNEVEN, **options)
    narrow = half_width(reference, residual=residual)
    halves = HALVES | ({15: 8} if residual else {})
    theirs = dict(reference.named_parameters())
    assert [name for name, _ in narrow.named_parameters()] == list(theirs)
    for name, tensor in narrow.named_parameters():
        corner = tuple(slice(halves.get(size, size)) for size in theirs[name].shape)
        assert torch.equal(tensor, theirs[name][corner]), name
    assert narrow(TOKENS).isfinite().all()


def test_unknown_and_doubled_names() -> None:
    check_baselines(["random", "stacking", "half_heads()"])
    for wrong, message in (
        (["randon"], r"baseline='randon' is not one of .*\(did you mean 'random'"),
        (["random(k=1)"], "random has no option 'k'; it has no options"),
        (["random", "random()"], "named twice"),
        (["nowhere_to_be:found"], "nowhere_to_be is not part|no module is imported"),
    ):
        with pytest.raises(WakefulError, match=message):
            check_baselines(wrong)


def evenly(setting: Setting, *, every: int = 2) -> Decoder:
    """Every so many layers.

    As far as they go.
    """
    total = setting.reference.config.num_layers
    return setting.inherit(LayerMap(tuple(range(0, total, every)), "evenly"))


TWICE = Baseline("half, then all", lambda s: s.inherit(first(1, of=4)), lambda s, _: s.everything())


def test_a_users_own_baseline_is_as_good_as_ours() -> None:
    given, here = setting(tiny_decoder()), __name__
    found = baseline_of(f"{here}:evenly(every=3)")
    assert found.summary == "Every so many layers."
    ours = found.start(given).blocks[1]
    for name, tensor in given.reference.blocks[3].named_parameters():
        assert torch.equal(ours.get_parameter(name), tensor)
    assert baseline_of(f"{here}:TWICE") is TWICE
    with pytest.raises(WakefulError, match=r"has no option 'evry' \(did you mean 'every'"):
        baseline_of(f"{here}:evenly(evry=3)")
