"""`quantize --bits`, `--bytes` and `--loss`: the formats that are chosen, written and proven."""

import json
import shlex
from pathlib import Path

import polars as pl
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import wakeful
from evaluation.models import save_llama
from helpers import some_tokens, tiny_decoder
from wakeful.errors import WakefulError
from wakeful.probes.running import logits_of
from wakeful.quantization import quantized_layers
from wakeful.quantization.compressed import state_bytes
from wakeful.quantization.convert import linear_layers
from wakeful.quantization.engines import VLLM
from wakeful.quantization.format_search import Budget, FormatSearch, split_text
from wakeful.quantization.measure import measure_losses
from wakeful.quantization.tuning import tune_scales


def llama(**over: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3, **{"vocab_size": 61, "tie_word_embeddings": True} | over,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


TEXT = [some_tokens(1, 24, vocab_size=61, seed=n) for n in range(8)]


def search(**budget: float) -> FormatSearch:
    model = llama()
    return FormatSearch(
        model, linear_layers(model), Budget(**budget), *split_text(TEXT),
        model_bytes=state_bytes(model), stored_dtype=torch.float32,
    )  # fmt: skip


def _index(tokens: torch.Tensor) -> int:
    return next(number for number, other in enumerate(TEXT) if other is tokens)


def test_every_fourth_sequence_selects_formats_and_the_rest_rounds_layers() -> None:
    rounding, selection = split_text(TEXT)
    assert [_index(tokens) for tokens in selection] == [3, 7]
    assert [_index(tokens) for tokens in rounding] == [0, 1, 2, 4, 5, 6]
    rounding, selection = split_text(TEXT[:3])
    assert (len(rounding), selection[0] is TEXT[2]) == (2, True)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [{"bits": 4.4}, {"bits": 6.0}, {"bytes": 80_000}])
def test_formats_are_within_the_budget_and_fused_layers_share_one(budget: dict) -> None:
    found = search(**budget).find_formats()
    size = state_bytes(found.module)
    assert size == found.allocation.bytes + found.other_bytes
    if "bits" in budget:
        assert budget["bits"] - 0.3 < found.bits <= budget["bits"]
    else:
        assert size <= budget["bytes"]
    layers = quantized_layers(found.module)
    assert set(layers) == {
        name for name, chosen in found.formats.items() if chosen != VLLM.full_precision
    }
    for block in range(2):
        place = f"model.layers.{block}"
        for names in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up")):
            assert len({found.formats[f"{place}.{name}_proj"] for name in names}) == 1
    assert found.allocation.bound <= found.allocation.cost + 1e-12
    smaller = ["W4A16 in groups of 64", "W4A16 in groups of 32"]
    four_bits = found.bits <= 4.5
    assert list(found.uniform_models) == (smaller if four_bits else [*smaller, "W8A16"])
    costs = [cost for _, cost in found.frontier]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.slow
def test_the_loss_that_is_allowed_is_kept_on_the_text_that_chooses() -> None:
    tried = search(loss=0.01)
    found = tried.find_formats()
    assert tried._mean_loss(found.module) - tried._mean_loss(tried.model) <= 0.01
    smaller = search(loss=0.2).find_formats()
    assert smaller.allocation.bytes < found.allocation.bytes


@pytest.mark.slow
def test_budgets_that_nothing_meets_are_refused() -> None:
    for budget, words in (
        ({"bits": 3.0}, r"bits = 3 are too few: .* take 4\.2. bits per weight"),
        ({"bytes": 9_000}, r"bytes = 9,000 are too few: the layers take .* all else 16,896"),
        ({"bits": 40.0}, "the model fits in full precision"),
        ({"bytes": 2**30}, "the model fits in full precision"),
    ):
        with pytest.raises(WakefulError, match=words):
            search(**budget).check()


@pytest.mark.slow
def test_tuned_scales_are_nearer_to_the_model_and_codes_and_other_models_stay() -> None:
    tried = search(bits=4.4)
    found = tried.find_formats()
    layers = quantized_layers(found.module)
    before = {name: (layer.integers.clone(), layer.scale.clone()) for name, layer in layers.items()}
    others = [logits_of(module, TEXT[0]) for module in found.uniform_models.values()]
    text = TEXT[:3]
    tuning = tune_scales(tried.model, found.module, text, text, steps=40, rate=5e-3)
    assert tuning.improved
    assert tuning.after[0] < 0.9 * tuning.before[0]
    assert quantized_layers(found.module) == layers
    for name, layer in layers.items():
        codes, scale = before[name]
        assert torch.equal(layer.integers, codes)
        assert layer.scale.dtype == torch.bfloat16
        assert not torch.equal(layer.scale, scale)
    for module, logits in zip(found.uniform_models.values(), others, strict=True):
        assert torch.equal(logits_of(module, TEXT[0]), logits)
    after = {name: layer.scale.clone() for name, layer in layers.items()}
    worse = tune_scales(tried.model, found.module, TEXT[:1], TEXT[3:7], steps=3, rate=1.0)
    assert not worse.improved
    assert all(torch.equal(layer.scale, after[name]) for name, layer in layers.items())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = save_llama(tmp_path / "llama")
    llama(vocab_size=258).save_pretrained(path)
    return path


@pytest.mark.slow
def test_a_layer_that_no_format_fits_is_saved_in_full_precision(
    folder: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("def return value layer for in range and the river went down " * 60)
    wide_groups = "scheme(weights=absmax(bits=4, per='channel', group=128))"
    result = wakeful.quantize(
        str(folder), wide_groups, bits=28.0, calibration_sequences=6, text=str(text), length=16,
        num_sequences=2, device="cpu", save=str(tmp_path / "small"),
    )  # fmt: skip
    # Only the inputs of `down_proj`, 128 channels, are whole groups.
    names = set(quantized_layers(result.model.module))
    assert names == {f"model.layers.{layer}.mlp.down_proj" for layer in range(2)}
    stored = load_file(tmp_path / "small" / "model.safetensors")
    assert {name for name in stored if name.endswith("scale")} == {
        f"{name}.weight_scale" for name in names
    }


@pytest.mark.slow
def test_a_file_of_chosen_formats_is_written_with_its_proof(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    text = tmp_path / "text"
    text.write_text("def return value layer for in range and the river went down " * 60)
    options = {"text": str(text), "length": 16, "num_sequences": 3, "device": "cpu"}
    result = wakeful.quantize(
        str(folder), bits=4.4, calibration_sequences=6, tune=2, save=str(tmp_path / "small"),
        out=str(tmp_path / "out"), **options,
    )  # fmt: skip
    small = result.model
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()
    tokens = some_tokens(2, 12, vocab_size=258)
    with torch.inference_mode():
        torch.testing.assert_close(
            logits_of(theirs, tokens), logits_of(small.module, tokens), rtol=1e-4, atol=1e-4
        )
    for name, layer in quantized_layers(small.module).items():
        assert torch.equal(theirs.get_submodule(name).weight.float(), layer.dequantize())
    said = json.loads((tmp_path / "out" / "summary.json").read_text("utf-8"))
    chosen, proof = said["smallest"], said["smallest"]["proof"]
    assert chosen["bits"] <= 4.4
    assert chosen["predicted_cost"] >= chosen["bound"]
    assert proof["against"] == "W4A16 in groups of 32"
    assert proof["verdict"] in (
        "better than uniform", "worse than uniform", "not better than uniform"
    )  # fmt: skip
    assert chosen["tuning"]["steps"] == 2
    sizes = {each["scheme"]: each["bytes"] for each in said["schemes"]}
    assert sizes["mixed"] == chosen["bytes"] <= sizes[proof["against"]]
    stored = load_file(tmp_path / "small" / "model.safetensors")
    assert {t.dtype for n, t in stored.items() if n.endswith("scale")} == {torch.bfloat16}
    card = (tmp_path / "small" / "README.md").read_text("utf-8")
    assert f"{proof['verdict'].capitalize()}: the chosen formats raise the loss" in card
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert "The smallest file" in page
    assert "sequences that chose nothing" in result.report.headlines[0]
    capsys.readouterr()
    for wrong, words in (
        ({"bits": 4.4, "bytes": 9}, "each limits the size"),
        ({"bits": 4.4, "sensitivity": True}, "they choose the formats"),
        ({"bits": -1.0}, "must not be negative"),
        ({"tune": 3}, "it trains the scales"),
        ({"bits": 4.4, "tune": 3, "tuning_state": "missing/state"}, "its folder does not exist"),
        ({"for_": "llama.cpp"}, "it is the engine whose formats are chosen"),
        ({"bits": 4.4, "calibration_sequences": 1}, "another for choosing formats"),
        ({"bits": 4.4, "num_sequences": 1}, "a comparison needs an interval"),
        ({"bits": 3.0}, "bits = 3 are too few"),
        ({"bits": 4.4, "scheme": "w4"}, "w4 cannot be saved"),
        (
            {"bits": 9.0, "scheme": "fp8(rotation=32)", "save": str(tmp_path / "rotated")},
            "rotates inputs, and cannot be one of several formats in a saved model",
        ),
        ({"scheme": ("fine", "fine(rotation=512)")}, "rotations of 512 do not divide"),
    ):
        with pytest.raises(WakefulError, match=words):
            wakeful.quantize(str(folder), **options | wrong)
    listed = wakeful.quantize(
        str(folder), bits=5.0, scheme=("w4a16(weights=absmax(bits=4, per='channel', group=32))",
        "scheme(weights=nv_e2m1(per='tensor'))", "fp8"), calibration_sequences=4, cache="fp8_head",
        tune=2, save=str(tmp_path / "floats"), **options,
    )  # fmt: skip
    assert listed.mixed_model is not None
    assert len(listed.mixed_model.engine.schemes) == 3
    table = json.loads((tmp_path / "floats" / "config.json").read_text("utf-8"))
    cache_scheme = table["quantization_config"]["kv_cache_scheme"]
    assert (cache_scheme["type"], cache_scheme["strategy"]) == ("float", "attn_head")
    read = wakeful.load(tmp_path / "floats").logits(tokens)
    expected = listed.model.logits(tokens)
    assert (read - expected).norm() < 0.05 * expected.norm()  # 4-bit floats are read as bfloat16
    rotated = wakeful.quantize(
        str(folder), bits=9.0, scheme="fp8(rotation=32)", calibration_sequences=4, **options
    )
    layers = quantized_layers(rotated.model.module).values()
    assert {layer.scheme.rotation for layer in layers} == {32}
    wakeful.quantize(
        str(folder), "fp8(rotation=32)", skip="*head", save=str(tmp_path / "alone"), **options
    )
    card = (tmp_path / "alone" / "README.md").read_text("utf-8")
    assert 'wakeful.load(".")' in card
    assert "AutoModel" not in card
    with pytest.raises(WakefulError, match="take one model, and 2 are named"):
        wakeful.quantize([str(folder), str(folder)], bits=4.4, **options)


@pytest.mark.slow
def test_models_of_other_tools_are_compared_on_the_same_text(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = tmp_path / "text"
    text.write_text("def return value layer for in range and the river went down " * 60)
    options = {
        "text": str(text), "length": 16, "num_sequences": 3, "calibration_sequences": 4,
        "device": "cpu",
    }  # fmt: skip
    w4a16 = "w4a16(weights=absmax(bits=4, per='channel', group=32))"
    wakeful.quantize(
        str(folder), w4a16, text=str(text), length=16, device="cpu", skip="*head", save="theirs"
    )
    result = wakeful.quantize(
        str(folder), bits=4.6, against=["theirs", folder], out="out", **options
    )
    damage = result.damage
    assert damage is not None
    theirs, full = damage.peers
    assert theirs.bytes == (tmp_path / "theirs" / "model.safetensors").stat().st_size
    assert full.totals.nll == pytest.approx(damage.measurement.full.nll)
    assert full.totals.divergence == pytest.approx([0.0] * 3, abs=1e-4)
    # The same by Transformers alone.
    ids = AutoTokenizer.from_pretrained("theirs")(text.read_text(), add_special_tokens=False)
    tokens = torch.tensor(ids.input_ids[:48]).view(3, 16)
    with torch.inference_mode():
        module = AutoModelForCausalLM.from_pretrained("theirs").eval()
        loss = float(module(tokens, labels=tokens).loss)
    assert sum(theirs.totals.nll) / sum(damage.measurement.counts) == pytest.approx(loss, rel=1e-4)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text("utf-8"))
    row, _ = summary["smallest"]["peers"]
    mixed = sum(damage.measurement.schemes["mixed"].nll) / sum(damage.measurement.counts)
    assert row["difference"] == pytest.approx(mixed - loss, abs=1e-6)
    assert row["verdict"].endswith("than theirs")
    headline = result.report.headlines[1]
    assert headline.startswith(f"{row['verdict'].capitalize()}: the chosen formats raise the loss")
    assert f"in {theirs.bytes / 1e6:,.1f} MB; difference, paired" in headline
    rows = pl.read_parquet(tmp_path / "out" / "sequences.parquet").filter(scheme="theirs")
    assert rows["nll"].to_list() == theirs.totals.nll
    page = (tmp_path / "out" / "report.html").read_text("utf-8")
    assert headline in page
    for wrong, words in (
        ({"bits": 4.6, "against": ["missing/model"]}, "there is no such folder or GGUF file; down"),
        ({"bits": 4.6, "against": ["theirs", "theirs"]}, "names theirs twice"),
        ({"bits": 1.0, "against": ["theirs"]}, "bits = 1 are too few"),
        ({"against": ["theirs"]}, "compare models by wakeful evaluate"),
    ):
        with pytest.raises(WakefulError, match=words):
            wakeful.quantize(str(folder), **options | wrong)


@pytest.mark.slow
def test_a_float32_file_gets_smaller_by_what_the_next_step_says(tmp_path: Path) -> None:
    folder = save_llama(tmp_path / "llama")
    llama(vocab_size=20_000).save_pretrained(folder)
    text = tmp_path / "text"
    text.write_text("def return value layer for in range and the river went down " * 60)
    options = {
        "text": str(text), "length": 16, "num_sequences": 3, "calibration_sequences": 4,
        "device": "cpu", "bits": 4.6,
    }  # fmt: skip
    result = wakeful.quantize(str(folder), save=str(tmp_path / "wide"), **options)
    before = (tmp_path / "wide" / "model.safetensors").stat().st_size
    step = result.report.steps[-1]
    words = shlex.split(step.command)
    assert words[:3] == ["wakeful", "export", str(folder)]
    assert words[4:] == ["--dtype", "bfloat16"]
    wakeful.export(str(folder), tmp_path / "narrow", dtype="bfloat16")
    narrow = wakeful.quantize(str(tmp_path / "narrow"), save=str(tmp_path / "small"), **options)
    after = (tmp_path / "small" / "model.safetensors").stat().st_size
    assert before - after == pytest.approx(2.56e6, rel=0.01)  # 20,000 embeddings of 64 channels
    assert f"they take {(before - after) / 1e6:,.1f} MB less" in step.text
    assert "export" not in str(narrow.report.steps)


def test_a_model_with_another_vocabulary_is_refused() -> None:
    small, large = tiny_decoder(vocab_size=11).eval(), tiny_decoder(vocab_size=13).eval()
    totals = measure_losses("theirs", small, large, [some_tokens(1, 8, vocab_size=11)])
    assert totals.divergence[0] > 0
    tokens = torch.tensor([[1, 2, 12]])
    with pytest.raises(WakefulError, match="theirs predicts 11 different tokens, and the text has"):
        measure_losses("theirs", small, large, [tokens])
