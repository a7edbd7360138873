"""The cure that is chosen for a format is the one that loses least, by the definition."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from helpers import tiny_decoder
from wakeful.curing import search as choosing
from wakeful.curing.options import CureOptions
from wakeful.curing.search import (
    GPTQ,
    NUM_CALIBRATION,
    NUM_PROOF,
    NUM_SEARCH,
    Candidate,
    CureChoice,
    FormatTrial,
    SearchTexts,
    choose_cure,
    parse_format,
)
from wakeful.errors import WakefulError
from wakeful.estimates import mean_and_error
from wakeful.hf.families.granite import SWA
from wakeful.hf.weights_out import stock_architecture
from wakeful.model.decoder import Decoder
from wakeful.quantization import parse_scheme, quantize_module, quantized_layers
from wakeful.quantization.schemes.methods import Smooth
from wakeful.reports.value import Table
from wakeful.surgery import rotate, store_prefix

W4A4 = parse_scheme(
    "scheme(weights=absmax(bits=8, per='channel'), inputs=absmax(bits=4, per='token'))"
)


@torch.no_grad()
def lopsided() -> Decoder:
    """Return a decoder in whose norms' outputs one channel stands out, and what reads them makes
    up for it: the same function as without.
    """
    made = tiny_decoder(dtype=torch.float32).eval()
    for block in made.blocks:
        attention, mlp = block.attention, block.mlp
        readers = (attention.query, attention.key, attention.value), (mlp.gate, mlp.up)
        for norm, layers in zip((block.attention_norm, block.mlp_norm), readers, strict=True):
            norm.weight[3] *= 40
            for layer in layers:
                layer.weight[:, 3] /= 40
    return made


@pytest.fixture(scope="module")
def texts() -> SearchTexts:
    """Return what the decoder says itself, whose loss it then rises from by any error."""
    made, generator = lopsided(), torch.Generator().manual_seed(0)
    rows = torch.randint(29, (SearchTexts.num_rows, 1), generator=generator)
    with torch.no_grad():
        for _ in range(22):
            odds = made(rows)[:, -1].softmax(-1)
            rows = torch.cat([rows, odds.multinomial(1, generator=generator)], 1)
    return SearchTexts.split(rows)


@torch.inference_mode()
def losses(model: nn.Module, rows: Tensor) -> Tensor:
    found = [
        nn.functional.cross_entropy(model(row[None])[0, :-1], row[1:]).double() for row in rows
    ]
    return torch.stack(found)


def tried_in(choice: CureChoice) -> list[FormatTrial]:
    return [trial for trials in choice.trials for trial in trials]


@pytest.mark.slow
def test_damages_are_those_of_the_definition_and_the_least_is_chosen(texts: SearchTexts) -> None:
    plain = lopsided()
    choice = choose_cure(plain, [W4A4], texts, token=3)
    trials = tried_in(choice)
    by_cure = {trial.candidate: trial.damage for trial in trials if trial.scheme == W4A4}
    full = losses(plain, texts.search)
    for candidate, made in (
        (Candidate(), plain),
        (Candidate(rotate="hadamard"), rotate(plain)),
        (Candidate(sink_cure="prefix"), store_prefix(plain, [3])),
    ):
        small = quantize_module(made, W4A4, skip=["head"])
        expected = mean_and_error((losses(small, texts.search) - full).numpy())
        assert by_cure[candidate] == pytest.approx(expected, rel=1e-3, abs=1e-4)
    least = min(trials, key=lambda trial: trial.damage[0])
    assert least.candidate.rotate
    assert choice.best == least.candidate
    assert choice.schemes == (least.scheme,)
    (proof,) = choice.proofs
    assert proof.interval[1] < 0
    assert proof.difference[0] == pytest.approx(proof.after[0] - proof.before[0])
    assert choice.winner == choice.best
    before, tried = (section.parts[0] for section in choice.sections)
    assert isinstance(before, Table)
    assert isinstance(tried, Table)
    assert [cell.text for cell in before.cells[0]][:1] == [str(least.scheme)]
    assert before.columns[1:3] == ["no cure", str(choice.best)]
    assert len(tried.rows) == len(choice.trials)
    assert str(choice.best) in choice.headlines[0]
    assert "not sure enough" not in choice.headlines[0]
    kept = replace(choice, best=Candidate())
    assert "not sure enough to keep" in kept.headlines[0]
    assert kept.description.startswith("no cure")


@pytest.mark.parametrize(("apart", "odd"), [(1, 0), (3, 7), (8, 3)])
def test_sequences_are_spread_over_the_text(apart: int, odd: int) -> None:
    """First those to choose by; those that calibrate are farthest from them."""
    drawn = SearchTexts.spread(torch.arange(SearchTexts.num_rows * 5 * apart + odd), 5)
    parts = (drawn.search, drawn.proof, drawn.calibration)
    assert [len(each) for each in parts] == [NUM_SEARCH, NUM_PROOF, NUM_CALIBRATION]
    rows = torch.cat(parts)
    assert rows[:, 0].tolist() == [5 * apart * row for row in range(SearchTexts.num_rows)]
    assert (rows.diff(dim=1) == 1).all()


def test_a_name_leaves_the_rounding_open_and_an_expression_says_it() -> None:
    for name in ("nvfp4", "mxfp4", "w4a8", "w4a4", "w4a16", "w4"):
        made = parse_format(name)
        assert made.method == GPTQ
        assert replace(made, method=None) == parse_scheme(name)
        assert parse_format(made.expression) == made
    for name in ("int8", "w8a8", "fp8", "kv4", "w4g128_gptq", W4A4.expression):
        assert parse_format(name) == parse_scheme({"int8": "w8a8"}.get(name, name))
    assert parse_format("w4a16(method=smooth)").method != GPTQ


def test_rotations_stay_within_blocks_of_weights_too() -> None:
    plain = lopsided()  # of width 16
    found = {
        name: {each.rotate for each in choosing.list_candidates(plain, [parse_scheme(name)], None)}
        for name in ("w4a16(weights=absmax(bits=4, per='channel', group=8))", "w4a16", "w4", "kv4")
    }
    assert [sorted(map(str, each)) for each in found.values()] == [
        ["", "block_diagonal(size=8)", "hadamard"],
        ["", "block_diagonal(size=16)", "hadamard"],
        ["", "hadamard"],
        ["", "hadamard"],
    ]


def test_an_inner_rotation_is_tried_unless_the_format_rotates_inputs() -> None:
    for name, combinations in (
        ("mxfp4", [(True, False)]), ("mxfp4(rotation=8)", []), ("kv4", [(False, True)]),
    ):  # fmt: skip
        tried = choosing.add_online_rotations(choosing.Candidate(), [parse_scheme(name)])
        assert [(each.inner, each.keys) for each in tried] == combinations


@pytest.mark.slow
@pytest.mark.parametrize("on_grid", [False, True])
def test_every_cure_is_rounded_as_the_uncured_model_is_best(
    texts: SearchTexts, on_grid: bool
) -> None:
    """Weights on a format's grid lose nothing to nearest, and something where channels divide."""
    nearest = parse_scheme("scheme(weights=absmax(bits=4, per='channel'))")
    other, plain = replace(nearest, method=Smooth() if on_grid else GPTQ), lopsided()
    if on_grid:
        for name, layer in quantized_layers(quantize_module(plain, nearest, skip=["head"])).items():
            plain.get_submodule(name).weight.data.copy_(layer.dequantize())
    choice = choose_cure(plain, [other], texts, token=None)
    trials = tried_in(choice)
    ways = trials[:2]
    assert {each.candidate for each in ways} == {Candidate()}
    assert {each.scheme for each in ways} == {nearest, other}
    assert ways[0].damage[0] <= ways[1].damage[0]
    assert {each.scheme for each in trials[2:]} == {ways[0].scheme}
    if on_grid:
        assert ways[0].scheme == nearest
        assert ways[0].damage[0] == pytest.approx(0, abs=1e-5)
    assert choice.schemes == (ways[0].scheme,)
    tried = choice.sections[1].parts[0]
    assert isinstance(tried, Table)
    assert tried.cells[1][1].small == str(ways[1].scheme)


def test_grids_that_clip_are_kept_and_told_of_without_a_cure() -> None:
    fine, before, after = choosing.clip_scheme(W4A4, 0.9), (0.5, 0.01), (0.3, 0.01)
    trials = tuple((FormatTrial(Candidate(), *each),) for each in ((W4A4, before), (fine, after)))
    proof = choosing.Proof(fine, before, after, (-0.2, 0.01))
    choice = choosing.CureChoice(Candidate(), (fine,), trials, (proof,))
    assert "costs 0.30" in choice.headlines[0]
    assert "clipped and 0.50" in choice.headlines[0]
    assert "nothing tried was better" not in choice.headlines[0]
    assert "not sure enough" not in choice.headlines[0]
    table = choice.sections[0].parts[0]
    assert isinstance(table, Table)
    assert table.columns[1:3] == ["no cure", "the best grids"]
    unsure = replace(choice, schemes=(W4A4,))
    assert "not sure enough to keep" in unsure.headlines[0]


@pytest.mark.slow
def test_what_is_not_surely_better_is_no_cure(texts: SearchTexts) -> None:
    """Eight bits of weights cost nothing here that a cure could save."""
    harmless = parse_scheme("scheme(weights=absmax(bits=8, per='channel'))")
    choice = choose_cure(lopsided(), [harmless], texts, token=None)
    assert {trial.candidate.sink_cure for trial in tried_in(choice)} == {""}
    assert choice.best == Candidate() or choice.proofs[0].interval[1] < 0
    alone = choose_cure(lopsided(), [parse_scheme("kv8")], texts, token=None)
    assert any(trial.candidate.keys for trial in tried_in(alone))
    assert alone.best == Candidate() or alone.proofs[0].interval[1] < 0


@pytest.mark.slow
def test_of_several_formats_the_mean_counts_and_none_gets_worse(texts: SearchTexts) -> None:
    choice = choose_cure(lopsided(), [W4A4, parse_scheme("kv4")], texts, token=None)
    assert len(choice.proofs) == 2
    assert {len(trials) for trials in choice.trials} == {2}
    assert choice.best == Candidate() or all(proof.difference[0] <= 0 for proof in choice.proofs)
    assert (len(texts.search), len(texts.proof)) == (NUM_SEARCH, NUM_PROOF)


def test_sinks_are_tried_where_cure_fits_them() -> None:
    firsts = {
        dtype: {
            each.sink_cure for each in choosing.list_candidates(lopsided().to(dtype), [W4A4], 3)
        }
        for dtype in (torch.float32, torch.bfloat16)
    }
    assert firsts == {torch.float32: {"", "prefix", "sinks"}, torch.bfloat16: {"", "prefix"}}
    with pytest.raises(WakefulError, match="--dtype bfloat16 and --sinks"):
        CureOptions(dtype="bfloat16", sinks=True)


@pytest.mark.slow
def test_engines_are_offered_what_stays_one_of_transformers_own(texts: SearchTexts) -> None:
    plain = lopsided()
    tried = {
        stock: {
            each.candidate
            for each in tried_in(choose_cure(plain, [W4A4], texts, token=3, stock=stock))
        }
        for stock in (False, True)
    }
    names = {
        stock: {
            stock_architecture(each.apply(plain, texts.calibration, 3).config)[0] for each in found
        }
        for stock, found in tried.items()
    }
    stocks = {"llama"} if SWA is None else {"llama", "granite_swa"}
    assert names == {False: {"wakeful", *stocks}, True: stocks}
    assert Candidate(rotate="hadamard") in tried[True]
    with pytest.raises(WakefulError, match="--stock needs --for"):
        CureOptions(rotate="hadamard", stock=True)


def test_a_format_chooses_alone() -> None:
    with pytest.raises(WakefulError, match="--for nvfp4 and --rotate hadamard"):
        CureOptions(for_=("nvfp4",), rotate="hadamard")
