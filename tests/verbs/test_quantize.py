"""The verb quantize: a model in, tables, a page and a smaller model out; and what it refuses."""

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from huggingface_hub import ModelCard
from test_diagnose import llama, save_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

import wakeful
from training.runs import text, tiny, write_text
from wakeful.cli import main
from wakeful.errors import WakefulError
from wakeful.estimates import format_perplexity
from wakeful.loading.load import load
from wakeful.loading.reading import as_evaluation_data
from wakeful.probes.running import logits_of
from wakeful.quantization import Absmax, Scheme, parse_scheme, quantize_module, quantized_layers
from wakeful.runs.run import Run
from wakeful.training.loop import train_run

__all__ = ["llama", "text"]
SMALL = ["--length", "16", "--num_sequences", "3"]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WAKEFUL_CACHE", str(folder / "cache"))
        config = tiny(write_text(folder / "text"), model={"route": "resformer"})
        return train_run(config, folder / "run").path


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(trained, tmp_path / "run"))


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert main(list(arguments)) == 1
    errors = capsys.readouterr().err.strip()
    assert "\n" not in errors
    assert errors.startswith(f"wakeful {arguments[0]}: ")
    return errors


@pytest.mark.slow
def test_all_schemes_make_one_table_and_one_page(
    text: Path, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    command = ["quantize", str(run), "--text", str(text), "--out", str(out), *SMALL]
    assert main([*command, "--scheme", "fine", "coarse", "coarse(scales='static')", "w4"]) == 0
    shown = capsys.readouterr().out
    names = ["fine", "coarse", "coarse static", "w4"]
    for name in names:
        assert re.search(rf"^{name} .*±.*%", shown, re.MULTILINE), name
    summary = json.loads((out / "summary.json").read_text())
    assert [each["scheme"] for each in summary["schemes"]] == names
    assert len(summary["layers"]) == 2 * 7 + 1
    assert summary["method"]["Perplexity"].startswith("exp(Σ nll / Σ tokens); window 16, stride 16")
    fine, w4 = summary["schemes"][0], summary["schemes"][-1]
    assert 0 < fine["layer_error_median"] < w4["layer_error_median"] < 0.5
    assert w4["bytes"] < fine["bytes"] < summary["bytes"]
    sequences = pl.read_parquet(out / "sequences.parquet")
    assert len(sequences) == 5 * 3
    for name, perplexity in (("", summary["perplexity"]), ("w4", w4["perplexity"])):
        rows = sequences.filter(pl.col("scheme") == name)
        loss = rows["nll"].sum() / rows["tokens"].sum()
        assert perplexity == pytest.approx(math.exp(loss))
    table = pl.read_parquet(out / "quantization.parquet")
    assert set(table["metric"]) == {"relative_error", "input_kurtosis"}
    assert set(table["model"]) == {"vanilla"}
    page = (out / "report.html").read_text()
    assert len(re.findall('class="spec"', page)) == 4
    assert "head</span></th>" in page
    assert Run.open(out).header.status == "done"
    assert Run.open(out).header.kind == "quantize"
    assert "exists already" in fails(capsys, *command)


@pytest.mark.slow
def test_the_perplexity_is_the_models_own(text: Path, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["quantize", str(run), "--text", str(text), "--out", str(out), *SMALL]
    assert main([*command, "--scheme", "fine"]) == 0
    loaded = load(str(run), device=CPU, dtype=torch.float32)
    words = "\n".join(path.read_text() for path in sorted(text.iterdir())[:4])
    tokens = torch.tensor(
        as_evaluation_data(words).sequences(loaded, length=16, num_sequences=3, bos=False)
    )
    summary = json.loads((out / "summary.json").read_text())
    for found, model in (
        (summary["perplexity"], loaded.module),
        (summary["schemes"][0]["perplexity"], quantize_module(loaded.module, "fine")),
    ):
        with torch.inference_mode():
            log = torch.cat([logits_of(model, each[None]).log_softmax(-1) for each in tokens])
        nll = -log[:, :-1].gather(2, tokens[:, 1:, None]).mean()
        assert found == pytest.approx(float(nll.exp()), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["fp8", "w4a16(weights=absmax(bits=4, per='channel'))"])
def test_a_saved_run_loads_generates_and_is_diagnosed(
    scheme: str, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = train_run(tiny(text), tmp_path / "run").path
    small = str(tmp_path / "small")
    where = ["--text", str(text), *SMALL]
    command = ["quantize", str(run), *where, "--scheme", scheme, "--save", small]
    assert main([*command, "--out", str(tmp_path / "out")]) == 0
    assert f"quantized model: {small}" in capsys.readouterr().out
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["saved"]["bytes"] == (Path(small) / "model.safetensors").stat().st_size
    assert summary["saved"]["bytes"] < summary["bytes"]
    loaded = load(small, device=CPU, dtype=torch.float32)
    full = load(str(run), device=CPU, dtype=torch.float32)
    tokens = torch.tensor([full.encode("def return value layer for in range")])
    with torch.inference_mode():
        expected = logits_of(quantize_module(full.module, scheme), tokens)
        found = logits_of(loaded.module, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    assert loaded.is_quantized
    assert loaded.encode_plain("def value") == full.encode("def value")
    said = []
    for _ in range(2):
        assert main(["generate", small, "--prompt", "def ", "--num_tokens", "6"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert said[0].startswith("def ")
    assert "step = 8" in fails(capsys, "generate", small, "--prompt", "x", "--step", "8")
    assert main(["diagnose", small, *where, "--out", str(tmp_path / "d")]) == 0
    assert "small" in capsys.readouterr().out
    again = ["quantize", small, *where, "--out", str(tmp_path / "again")]
    assert "quantized already" in fails(capsys, *again)
    assert not (tmp_path / "again").exists()
    assert "exists already" in fails(capsys, *command, "--out", str(tmp_path / "again"))


@pytest.mark.slow
def test_a_saved_transformers_model_loads_and_generates(
    text: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    config = json.loads((llama / "tokenizer_config.json").read_text())
    (llama / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<bos>"}))
    small = str(tmp_path / "small")
    where = ["--text", str(text), "--out", str(tmp_path / "out"), *SMALL, "--bos"]
    save = ["--scheme", "fp8", "--save", small]
    assert main(["quantize", str(llama), *where, *save]) == 0
    loaded = load(small, device=CPU, dtype=torch.float32)
    assert (loaded.context, loaded.bos, loaded.name) == (64, 256, "small")
    card = (tmp_path / "small/README.md").read_text("utf-8")
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert f"Made from {llama}, whose license holds here too" in card
    options = "--length 16 --bos on --scheme fp8 --num_sequences 3"
    assert f"    wakeful quantize {llama} --text {text} {options} --save {small}\n" in card
    before, error = summary["perplexity"], summary["perplexity_standard_error"]
    perplexity = format_perplexity(math.log(before), error / before, 3)
    known = "95% confidence interval (Student's t)"
    row = f"3 windows of a text, {summary['tokens']:,} tokens, {known} | {perplexity} |"
    assert row in card
    model = AutoModelForCausalLM.from_pretrained(llama).eval()
    tokens = torch.arange(20)[None]
    with torch.inference_mode():
        expected = quantize_module(model, "fp8")(tokens).logits
        found = loaded.module(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    chosen = loaded.encode_plain("abc")
    with torch.inference_mode():
        for _ in range(8):
            last = loaded.module(torch.tensor([chosen])).logits[0, -1]
            chosen.append(int(last.argmax()))
    continued = loaded.generate_ids(chosen[:3], num_tokens=8, temperature=0.0)
    assert list(continued) == chosen[3:]
    capsys.readouterr()
    said = []
    for _ in range(2):
        assert main(["generate", small, "--prompt", "abc", "--num_tokens", "8"]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert said[0].startswith("abc")
    assert "more than the model's context of 64" in fails(
        capsys, "generate", small, "--prompt", "abc", "--num_tokens", "99"
    )


@pytest.mark.slow
@pytest.mark.parametrize("ours", [True, False])
def test_a_model_is_saved_for_stock_loaders(llama: Path, tmp_path: Path, ours: bool) -> None:
    tokenizer = AutoTokenizer.from_pretrained(llama)
    tokenizer.eos_token = "<bos>"
    tokenizer.save_pretrained(llama)
    model = wakeful.load(str(llama))
    if ours:
        model = replace(model, module=model.decoder())
    folder = tmp_path / "small"
    small = wakeful.quantize(model, "fp8", save=str(folder)).model
    table = json.loads((folder / "config.json").read_text())
    assert table["architectures"] == ["LlamaForCausalLM"]
    assert table["quantization_config"]["quant_method"] == "compressed-tensors"
    assert table["eos_token_id"] == model.tokenizer.convert_tokens_to_ids("<bos>") or not ours
    assert AutoTokenizer.from_pretrained(folder).encode("a fox") == tokenizer.encode("a fox")
    card = (folder / "README.md").read_text("utf-8")
    assert ModelCard(card).data.tags == ["wakeful", "quantized", "compressed-tensors"]
    assert "import wakeful" not in card
    assert "## Before and after" not in card  # nothing was measured
    tokens = torch.arange(12)[None]
    with torch.inference_mode():
        found = AutoModelForCausalLM.from_pretrained(folder)(tokens).logits
        again = wakeful.load(str(folder)).logits(tokens)
        torch.testing.assert_close(found, small.logits(tokens), rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(again, small.logits(tokens), rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_figures_are_saved_for_papers(text: Path, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["quantize", str(run), "--text", str(text), "--out", str(out), *SMALL]
    assert main([*command, "--scheme", "fine", "w4", "--figures", "svg"]) == 0
    files = sorted(path.name for path in (out / "figures").iterdir())
    assert files == [
        "relative-error-of-every-layer-under-fine.svg",
        "relative-error-of-every-layer-under-w4.svg",
    ]  # fmt: skip
    assert all((out / "figures" / name).read_bytes().startswith(b"<svg") for name in files)


@pytest.mark.slow
def test_methods_formats_and_caches_make_a_page(text: Path, run: Path, tmp_path: Path) -> None:
    schemes = ["kv4", "w4g128", "w4g128_gptq", "smoothquant", "nvfp4"]
    given = {"text": str(text), "length": 16, "num_sequences": 2, "calibration_sequences": 1}
    found = wakeful.quantize(str(run), *schemes, **given, out=str(tmp_path / "out"))
    assert [each["scheme"] for each in found.summary["schemes"]] == schemes
    cache, *others = found.summary["schemes"]
    assert cache["layer_error_worst"] is None
    assert cache["kl"] > 0
    assert all(0 < each["layer_error_median"] < 0.6 for each in others)
    assert found.method["Calibration"].startswith("1 further sequences")
    page = (tmp_path / "out" / "report.html").read_text()
    assert "No layer&#39;s weights change." in page  # in the grade of kv4
    alone = wakeful.quantize(str(run), "kv8", text=str(text), length=16, out=str(tmp_path / "kv"))
    assert alone.summary["schemes"][0]["worst_layer"] is None
    assert alone.layers == ()
    assert not alone.head
    assert alone.method["Layers"].startswith("none: keys and values")
    with pytest.raises(
        WakefulError, match=r"per tensor or head .*: name one of .*, or leave --save out"
    ):
        wakeful.quantize(str(run), "kv8", save=str(tmp_path / "small"))
    with pytest.raises(WakefulError, match="kv8 and kv4 quantize the cache alone"):
        wakeful.quantize(str(run), "kv8", "kv4", text=str(text), skip=("*",))
    both = wakeful.quantize(str(run), "kv4", "fine", text=str(text), length=16, skip=("*query*",))
    assert both.layers
    assert not any("query" in name for name in both.layers)


@pytest.mark.slow
def test_calibration_reads_the_texts_that_are_named(text: Path, run: Path, tmp_path: Path) -> None:
    others = [tmp_path / "verse.txt", tmp_path / "code.txt"]
    others[0].write_text("and so the wind went down along the river " * 40)
    others[1].write_text("for i in range(9): print(i ** 2, i + 1)\n" * 40)
    texts = tuple(map(str, others))
    given: dict[str, Any] = {
        "text": str(text), "length": 16, "num_sequences": 2, "calibration_sequences": 3,
    }  # fmt: skip
    found = wakeful.quantize(run, "w4g128_gptq", **given, calibration_text=texts)
    told = found.method["Calibration"]
    assert told.startswith(f"3 sequences from the beginning of {texts[0]} and {texts[1]}, for")
    loaded = load(run)
    rows = [
        torch.tensor([row])
        for words, number in zip(
            map(as_evaluation_data, map(Path.read_text, others)), (2, 1), strict=True
        )
        for row in words.sequences(
            loaded, length=16, num_sequences=number, bos=loaded.starts_with_bos("auto")
        )
    ]
    assert len(rows) == 3
    expected = quantize_module(loaded.module, parse_scheme("w4g128_gptq"), calibration=rows)
    tokens = torch.arange(12)[None]
    assert torch.equal(found.model.logits(tokens), logits_of(expected, tokens))
    following = wakeful.quantize(run, "w4g128_gptq", **given).model
    assert not torch.equal(found.model.logits(tokens), following.logits(tokens))


def test_calibration_text_that_cannot_be_is_refused(text: Path, run: Path) -> None:
    given: dict[str, Any] = {"text": str(text), "length": 16, "num_sequences": 2}
    with pytest.raises(WakefulError, match="no scheme here needs calibration"):
        wakeful.quantize(run, "fine", **given, calibration_text=("a.txt",))
    with pytest.raises(WakefulError, match=r"calibration_sequences = 1: .* of 2 texts"):
        wakeful.quantize(
            run, "smoothquant", **given, calibration_text=("a", "b"), calibration_sequences=1
        )
    with pytest.raises(WakefulError, match="begins with the sequences that are measured"):
        wakeful.quantize(run, "smoothquant", **given, calibration_text=(str(text),))


@pytest.mark.slow
def test_several_models_make_one_matrix(
    text: Path, run: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out, schemes = tmp_path / "out", ["coarse", "w4g128_gptq"]
    where = ["--text", str(text), *SMALL, "--calibration_sequences", "1", "--figures", "svg"]
    command = ["quantize", str(run), str(llama), *where, "--scheme", *schemes]
    assert main([*command, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    for name in ("vanilla", "llama"):
        assert re.search(rf"^{name} .*±", shown, re.MULTILINE), name
    summary = json.loads((out / "summary.json").read_text())
    assert [each["model"] for each in summary["models"]] == ["vanilla", "llama"]
    for each, alone in zip(summary["models"], (run, llama), strict=True):
        given = {"text": str(text), "length": 16, "num_sequences": 3, "calibration_sequences": 1}
        same = wakeful.quantize(str(alone), *schemes, **given).summary
        assert same.keys() == each.keys()
        for one, other in zip(each["schemes"], same["schemes"], strict=True):
            assert one == other
    assert set(pl.read_parquet(out / "quantization.parquet")["model"]) == {"vanilla", "llama"}
    assert len(pl.read_parquet(out / "sequences.parquet")) == 2 * 3 * 3
    page = (out / "report.html").read_text()
    assert len(re.findall('class="spec"', page)) == 4
    assert page.count(" nats</span>") == 4
    assert Run.open(out).header.kind == "quantize"
    assert len(list((out / "figures").iterdir())) == 4


def test_what_was_measured_before_a_model_that_fails_is_kept(
    text: Path, run: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    broken, out = Path(shutil.copytree(llama, tmp_path / "broken")), tmp_path / "out"
    command = ["quantize", str(run), str(broken), "--text", str(text), "--scheme", "fine", *SMALL]
    with (broken / "model.safetensors").open("r+b") as file:
        file.truncate(2000)
    fails(capsys, *command, "--out", str(out))
    models = json.loads((out / "summary.json").read_text())["models"]
    assert [each["model"] for each in models] == ["vanilla"]
    assert (out / "report.html").is_file()
    (tmp_path / "empty").mkdir()
    fails(capsys, *command[:2], str(tmp_path / "empty"), *command[3:], "--out", f"{out}2")
    assert not Path(f"{out}2").exists()  # a name that is wrong is said first


def test_layers_are_those_of_the_model_as_it_is_quantized(text: Path, tmp_path: Path) -> None:
    """Projections beside the embeddings are multiplied into them, which unties the head."""
    changes = {"tied": True, "embedding": "projected"}
    run = train_run(tiny(text, model=changes), tmp_path / "projected").path
    found = wakeful.quantize(str(run), "fine")
    assert found.head
    assert list(found.layers) == list(quantized_layers(found.model.module))


def test_a_scheme_is_given_as_an_object_or_from_ones_own_module(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_schemes.py").write_text(
        "from wakeful.quantization import Absmax, Scheme\n"
        "class Sixes(Scheme):\n"
        "    def __init__(self):\n"
        "        super().__init__(weights=Absmax(bits=6, per='channel'))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    given = Scheme(weights=Absmax(bits=6, per="channel"))
    one = wakeful.quantize(str(run), given).model
    other = wakeful.quantize(str(run), "my_schemes:Sixes").model
    assert other.name.endswith(" my_schemes:Sixes")
    tokens = torch.arange(12)[None]
    assert torch.equal(one.logits(tokens), other.logits(tokens))


@pytest.mark.slow
def test_one_sequence_has_no_errors(text: Path, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    one = ["--length", "16", "--num_sequences", "1", "--scheme", "fine"]
    assert main(["quantize", str(run), "--text", str(text), "--out", str(out), *one]) == 0
    summary = json.loads((out / "summary.json").read_text())
    assert summary["perplexity_standard_error"] is None
    assert summary["schemes"][0]["kl_standard_error"] is None
    assert "nan" not in (out / "report.html").read_text().split("<main>")[1].split("</main>")[0]


@pytest.mark.slow
def test_bad_input_is_one_line_and_writes_nothing(
    text: Path, run: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out, small = tmp_path / "out", tmp_path / "small"
    where = ["--text", str(text), "--out", str(out), *SMALL]

    def wrong(*more: str, model: Path = run) -> str:
        pairs = zip(where[::2], where[1::2], strict=True)
        others = [part for name, value in pairs if name not in more for part in (name, value)]
        return fails(capsys, "quantize", str(model), *others, *more)

    assert "name a model" in fails(capsys, "quantize", *where)
    two = ["quantize", str(run), str(llama), *where]
    assert "--save writes one model, and 2 are named" in fails(capsys, *two, "--save", str(small))
    assert "is named twice" in fails(capsys, "quantize", str(run), str(run), *where)
    assert "did you mean 'coarse'" in wrong("--scheme", "coarser")
    assert "named twice" in wrong("--scheme", "fine", "fine")
    static = "coarse(scales='static')"
    assert "nothing to calibrate" in wrong("--scheme", "fine(scales='static')")
    assert "coarse static is named twice" in wrong("--scheme", static, "coarse", static)
    assert "context of 32 tokens" in wrong("--length", "33")
    assert "num_sequences must be at least 1, got 0" in wrong("--num_sequences", "0")
    assert "--skip lm_head matches no layer" in wrong("--skip", "lm_head")
    assert "name one with --scheme" in wrong("--save", str(small))
    one = ["--scheme", "fine", "--save"]
    for same in (out, out / "model", tmp_path):
        assert "one is inside the other: name two" in wrong(*one, str(same))
    assert "exists already" in wrong(*one, str(run))
    said = wrong("--save", str(small), "--scheme", "coarse")
    assert "coarse cannot be saved as compressed-tensors" in said
    assert said.endswith("or leave --save out to measure without saving")
    few = tmp_path / "few.txt"
    few.write_text("one short line\n" * 6)
    short = ["--scheme", static, "--text", str(few)]
    assert "19 sequences of 16 tokens need 304 tokens" in wrong(*short)
    assert not out.exists()
    assert not small.exists()
    assert not list(tmp_path.glob(".*.part"))
    skipped = ["--skip", "model.layers.1.mlp.up_proj", *one, str(small)]
    assert main(["quantize", str(llama), *where, *skipped]) == 0
    table = json.loads((small / "config.json").read_text())["quantization_config"]
    assert table["ignore"] == ["model.layers.1.mlp.up_proj"]


@pytest.mark.slow
def test_a_name_is_escaped_in_the_page(text: Path, llama: Path, tmp_path: Path) -> None:
    evil = llama.rename(tmp_path / "<img src=x onerror=alert(1)>")
    save_tokenizer(evil)
    out = tmp_path / "out"
    command = ["quantize", str(evil), "--text", str(text), "--out", str(out), *SMALL]
    assert main([*command, "--scheme", "fine"]) == 0
    assert "<img src=x" not in (out / "report.html").read_text()


@pytest.mark.slow
def test_what_cannot_be_saved_is_refused_before_anything_is_measured(
    text: Path, run: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    def measured(*_: object, **__: object) -> None:
        raise AssertionError

    for name in ("measure_damage", "quantize_module"):
        monkeypatch.setattr(f"wakeful.quantization.tool.{name}", measured)
    stock = ["--text", str(text), *SMALL, "--save", str(tmp_path / "small"), "--out",
             str(tmp_path / "out"), "--scheme"]  # fmt: skip
    said = fails(capsys, "quantize", str(run), *stock, "fine")
    assert "--rotate hadamard, --rotate_inner and --sinks leave" in said
    odd = "w4a16(weights=absmax(bits=4, per='channel', group=24))"
    said = fails(capsys, "quantize", str(llama), *stock, odd)
    assert "reads 16 channels, which are not whole groups of 24" in said
    offered = re.search(r'--scheme "(.*?)", or', said)
    assert offered is not None
    monkeypatch.undo()
    assert main(["quantize", str(llama), *stock, offered[1]]) == 0
    assert (tmp_path / "small" / "model.safetensors").is_file()


@pytest.mark.slow
def test_figures_are_written_where_the_model_cannot_be(
    text: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    def full(*_: object, **__: object) -> None:
        raise WakefulError("the disk is full")

    monkeypatch.setattr("wakeful.quantization.result.save_compressed", full)
    command = ["--text", str(text), *SMALL, "--scheme", "fine", "--save", str(tmp_path / "small")]
    out = tmp_path / "out"
    said = fails(capsys, "quantize", str(llama), *command, "--out", str(out))
    assert said == "wakeful quantize: the disk is full"
    assert (out / "report.html").is_file()
    assert json.loads((out / "summary.json").read_text())["saved"] is None


@pytest.mark.slow
def test_layers_are_ranked_by_what_they_cost(
    text: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    plain = ["--text", str(text), *SMALL, "--scheme", "w4", "--sensitivity", "--out", str(out)]
    assert main(["quantize", str(llama), *plain]) == 0
    assert "costs most alone" in capsys.readouterr().out.replace("\n", " ")
    summary = json.loads((out / "summary.json").read_text("utf-8"))
    costs = pl.read_parquet(out / "sensitivity.parquet")
    assert costs.to_dicts() == summary["costs"]
    assert costs["alone"].is_sorted(descending=True)
    assert len(costs) == len(summary["layers"])
    several = ["--text", str(text), *SMALL, "--scheme", "w4", "fine", "--sensitivity"]
    assert "ranks the layers of one model" in fails(capsys, "quantize", str(llama), *several)
