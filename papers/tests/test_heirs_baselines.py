"""Baselines: what each starts from."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import some_tokens, tiny_decoder
from inheritance.references import reference, text, trained
from inheritance.test_heirs_recipe import quietly
from wakeful.errors import WakefulError
from wakeful.inheritance.blocks import inherit_blocks
from wakeful.inheritance.layers import first
from wakeful.model.decoder import Decoder
from wakeful.model.initialize import initialize
from wakeful.runs.run import Run
from wakeful_papers.heirs import (
    BASELINES,
    Setting,
    alternate,
    find_baseline,
    half_width,
    halfway_steps,
    inherit_with_baselines,
    last,
    laziest,
    middle,
    twice,
)

__all__ = ["reference", "text", "trained"]
TOKENS = some_tokens(2, 13)


def setting(reference: Decoder, depth: int = 3, **options: Any) -> Setting:
    layers = first(depth, of=reference.config.num_layers)
    return Setting(
        reference, layers, seed=5, lazy=last(depth, of=reference.config.num_layers), **options
    )


def test_the_papers_layers() -> None:
    # Table 4: layers 1-4, 5-8 and 9-12 of 12, counted from 1.
    assert [m(4, of=12).sources for m in (first, middle, last)] == [
        (0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11),
    ]  # fmt: skip
    # Appendix B: the DistilBERT-style student of 16 of 24, and stacking 9 layers to 18.
    assert alternate(16, of=24).sources == (*range(0, 24, 2), 18, 19, 20, 21)
    assert alternate(3, of=12).sources == (0, 4, 8)
    assert alternate(4, of=4).sources == (0, 2, 0, 1)
    assert alternate(3, of=5).sources == (0, 2, 4)
    assert twice(18, of=9).sources == (*range(9), *range(9))
    assert twice(15, of=30).sources == (*range(8), *range(7))
    assert laziest([5.0, 9.0, 1.0, 2.0, 7.0], 2).sources == (2, 3)
    assert laziest([5.0, 9.0, 1.0, 2.0, 7.0], 3).sources == (2, 3, 4)


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
    expected = 4 if name in ("half_width", "half_heads", "reference") else 3
    assert decoder.config.num_layers == expected


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


@pytest.mark.parametrize(
    ("copy", "inherited"),
    [
        ("attention", {"attention_norm", "attention"}),
        ("mlp", {"mlp_norm", "mlp"}),
        ("without_norms", {"attention", "mlp"}),
        ("blocks", {"attention_norm", "attention", "mlp_norm", "mlp"}),
        ("embeddings", set()),
    ],
)
def test_parts_of_blocks(copy: Any, inherited: set[str]) -> None:
    given = setting(tiny_decoder(bias=True), 2)
    heir, random = given.inherit(given.layers, copy=copy), BASELINES["random"].start(given)
    for name, tensor in heir.named_parameters():
        place = name.split(".")
        taken = place[2] in inherited if place[0] == "blocks" else copy != "blocks"
        expected = given.reference if taken else random
        assert torch.equal(tensor, expected.get_parameter(name)), name


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
    silent = inherit_blocks(reference, first(4, of=4))
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


def test_unknown_names() -> None:
    assert find_baseline("random").summary == "the same shape at random"
    with pytest.raises(WakefulError, match=r"baseline='randon' is not one of .*mean 'random'"):
        find_baseline("randon")


def test_baselines_that_begin_at_random_are_known() -> None:
    assert {name for name, each in BASELINES.items() if each.from_random} == {
        "random", "random_twice", "stacking", "full_stacking", "distillation", "distillation_mean"
    }  # fmt: skip


def test_half_way_falls_on_an_evaluation() -> None:
    for steps, every, half in ((10, 2, 4), (10, 5, 5), (9, 3, 3), (100, 20, 40), (2, 1, 1),
                               (4, 50, 2), (7, 0, 3)):  # fmt: skip
        assert halfway_steps(steps, every) == half
        assert 0 < half < steps


def test_baselines_are_trained_beside_the_heirs_on_their_budget(
    reference: Run, text: Path, tmp_path: Path
) -> None:
    names = ("random", "stacking", "full_stacking", "half_width", "distillation", "lazy", "at_once")
    options = {
        "text": str(text), "validation_fraction": 0.1, "layers": 2, "grow": 1, "rounds": 2,
        "until": "budget", "choose": "first", "bridge": {"map": "none"}, "heal": {"by": "text"},
        "steps": 4, "eval_every": 2, "batch_size": 2, "length": 16, "device": "cpu",
    }  # fmt: skip
    out = tmp_path / "out"
    found = inherit_with_baselines(str(reference.path), options, names, out, quietly)
    assert not found.diverged
    arms = {arm.arm: arm for arm in found.arms}
    assert list(arms) == ["heir-2", "heir-3", *names]
    one = 4 * 2 * 16  # tokens of a round
    usual = dict.fromkeys(arms, (4, one))
    assert {name: (arm.steps, arm.tokens) for name, arm in arms.items()} == usual | {
        "full_stacking": (8, 2 * one), "at_once": (8, 2 * one),
    }  # fmt: skip
    assert [arms["stacking"].runs, arms["full_stacking"].runs] == [
        ("stacking-1", "stacking"), ("full_stacking-1", "full_stacking")
    ]  # fmt: skip
    halves = [Run.open(out / name) for name in ("stacking-1", "stacking")]
    assert [(half.config.train.steps, half.config.model.num_layers) for half in halves] == [
        (2, 2), (2, 3)
    ]  # fmt: skip
    assert halves[1].config.data.first_batch == 2
    assert arms["half_width"].depth == 4
    teacher = Run.open(out / "distillation").config.train.distill
    assert (teacher.teacher, teacher.over) == (str(reference.path), "sum")
    random = arms["random"]
    assert random.minus_heir == pytest.approx(random.loss - arms["heir-3"].loss, abs=1e-6)
    # What is there is read.
    shutil.rmtree(out / "random")
    assert inherit_with_baselines(str(reference.path), options, names, out, quietly) == found
