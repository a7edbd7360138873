"""The verb evaluate: models in, tables and a page out; and what it refuses."""

import importlib.util
import json
import math
import re
import sys
from pathlib import Path

import polars as pl
import pytest
import torch

from evaluation.models import CHOICES, LAMBADA, llama, save_llama, write_lines
from training.runs import text, tiny
from wakeful.cli import main
from wakeful.data.sources import TextBeginning
from wakeful.evaluation import task_set
from wakeful.evaluation.perplexity import measure_perplexity
from wakeful.loading import reading
from wakeful.loading.load import load
from wakeful.runs.run import Run
from wakeful.training.loop import train_run

__all__ = ["llama", "text"]
HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None
needs_lm_eval = pytest.mark.skipif(not HAS_LM_EVAL, reason="needs lm-eval")


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()  # what saving the model printed
    assert main(["evaluate", *arguments]) == 1
    errors = capsys.readouterr().err.strip()
    assert "\n" not in errors
    assert errors.startswith("wakeful evaluate: ")
    return errors


@needs_lm_eval
def test_models_stand_side_by_side(
    text: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    other = save_llama(tmp_path / "other", seed=1)
    run = train_run(tiny(text, model={"max_length": 200}), tmp_path / "run")
    out = tmp_path / "out"
    words = text / "000.txt"
    command = [
        "evaluate", str(llama), str(other), str(run.path), "--text", str(words), "--length", "24",
        "--stride", "8", "--lambada", write_lines(tmp_path / "l.jsonl", LAMBADA),
        "--choices", write_lines(tmp_path / "c.jsonl", CHOICES), "--out", str(out),
    ]  # fmt: skip
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert "choices: acc_norm" in shown
    assert "report: " in shown
    look = f"wakeful diagnose {llama} {other} {run.path} --text {words}"
    assert look in " ".join(shown.split())
    summary = json.loads((out / "summary.json").read_text())
    assert [model["model"] for model in summary["models"]] == ["llama", "other", "vanilla"]
    scores = {(s["task"], s["metric"]): s for s in summary["models"][0]["scores"]}
    assert set(scores) == {
        ("text", "perplexity"), ("text", "bits per byte"), ("lambada", "acc"),
        ("lambada", "perplexity"), ("choices", "acc"), ("choices", "acc_norm"),
    }  # fmt: skip
    loaded = load(str(llama), device=torch.device("cpu"), dtype=torch.float32)
    expected, bits = measure_perplexity(loaded, words.read_text(), length=24, stride=8)
    assert scores["text", "perplexity"]["value"] == pytest.approx(expected.figure)
    assert scores["text", "bits per byte"]["standard_error"] == pytest.approx(bits.error)
    assert scores["lambada", "acc"]["examples"] == len(LAMBADA)
    # The two Llamas have one tokenizer: paired on the text too. The run has its own.
    pairs = {(d["model"], d["task"], d["metric"]): d for d in summary["differences"]}
    assert {key[1:] for key in pairs if key[0] == "other"} == set(scores)
    assert {key[1] for key in pairs if key[0] == "vanilla"} == {"lambada", "choices"}
    other_scores = {(s["task"], s["metric"]): s for s in summary["models"][1]["scores"]}
    paired = pairs["other", "lambada", "perplexity"]["difference"]
    name = ("lambada", "perplexity")
    logarithms = [math.log(each[name]["value"]) for each in (other_scores, scores)]
    assert paired == pytest.approx(logarithms[0] - logarithms[1])

    table = pl.read_parquet(out / "evaluation.parquet")
    assert set(table["model"]) == {"llama", "other", "vanilla"}
    mine = table.filter(pl.col("model") == "llama", pl.col("metric") == "perplexity")
    nats = mine.filter(pl.col("task") == "text").select(
        pl.col("value").sum() / pl.col("weight").sum()
    )
    assert math.exp(nats.item()) == pytest.approx(expected.figure)
    assert summary["method"]["BOS"] == "none, as its tokenizer does"
    assert "windows of 24 tokens every 8" in summary["method"]["Text"]
    page = (out / "report.html").read_text()
    assert len(re.findall('class="spec"', page)) == len(scores)
    assert "bits per byte" in page
    header = Run.open(out).header
    assert (header.kind, header.status) == ("evaluate", "done")
    assert "exists already" in fails(capsys, *command[1:])


def test_a_text_alone_needs_no_lm_eval(
    text: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
) -> None:  # fmt: skip
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    words = ["--text", str(text), "--num_sequences", "3", "--length", "32", "--bos"]
    out = tmp_path / "out"
    assert main(["evaluate", str(llama), *words, "--out", str(out)]) == 0
    assert not any(name.split(".")[0] == "lm_eval" for name in sys.modules)
    summary = json.loads((out / "summary.json").read_text())
    assert summary["method"]["BOS"] == "before every sequence"
    assert "at most 3 windows" in summary["method"]["Text"]
    page = (out / "report.html").read_text()
    assert 'class="spec"' not in page  # one model has nothing to stand beside
    assert "differences" in page
    lambada = write_lines(tmp_path / "l.jsonl", LAMBADA)
    where = ["--lambada", lambada, "--out", str(tmp_path / "other")]
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.delitem(sys.modules, "wakeful.evaluation.tasks", raising=False)
    assert task_set.INSTALL_LM_EVAL in fails(capsys, str(llama), *where)


def test_without_a_text_it_is_the_standard_librarys(
    text: Path, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, int]] = []

    def read_beginning(source: str, num_tokens: int) -> TextBeginning:
        read.append((source, num_tokens))
        return TextBeginning((text / "000.txt").read_text())

    monkeypatch.setattr(reading, "read_beginning", read_beginning)
    out = tmp_path / "out"
    assert main(["evaluate", str(llama), "--length", "16", "--out", str(out)]) == 0
    assert read == [("python-stdlib", 16 * 64)]
    method = json.loads((out / "summary.json").read_text())["method"]
    assert "python-stdlib, at most 64 windows" in method["Text"]


@needs_lm_eval
def test_bos_and_limit_reach_the_tasks(llama: Path, tmp_path: Path) -> None:
    lambada = ["--lambada", write_lines(tmp_path / "l.jsonl", LAMBADA), "--limit", "3"]
    values = []
    for extra in ([], ["--bos"]):
        out = tmp_path / f"out{len(extra)}"
        assert main(["evaluate", str(llama), *lambada, *extra, "--out", str(out)]) == 0
        table = pl.read_parquet(out / "evaluation.parquet")
        assert len(table) == 6
        values.append(table.filter(pl.col("metric") == "perplexity")["value"].to_list())
    assert values[0] != pytest.approx(values[1], rel=1e-3)


def test_bad_input_is_one_line_and_writes_nothing(
    text: Path, llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "out"
    where = ["--out", str(out)]
    words = ["--text", str(text), "--length", "16", *where]
    model = str(llama)
    assert "name a model" in fails(capsys, *words)
    assert "every text is named" in fails(capsys, model, *words, "--texts", "python-stdlib")
    assert "cannot be loaded" in fails(capsys, str(tmp_path / "none"), *words)
    assert f"{model} is named twice" in fails(capsys, model, model, *words)
    assert "no such file" in fails(capsys, model, "--text", str(tmp_path / "none.txt"), *where)
    assert "context of 64 tokens" in fails(capsys, model, *words[:2], "--length", "65", *where)
    assert "between 1 and the length" in fails(capsys, model, *words, "--stride", "17")
    assert "must not be negative" in fails(capsys, model, *words, "--num_sequences=-1")
    assert "batch_size must be at least 1, got 0" in fails(
        capsys, model, *words, "--batch_size", "0"
    )
    assert "--limit 5 needs --lambada or --choices" in fails(capsys, model, *words, "--limit", "5")
    short = tmp_path / "short.txt"
    short.write_text("x")
    few = ["--text", str(short), "--length", "16", *where]
    assert "at least 2 are needed" in fails(capsys, model, *few)
    short.write_bytes(b"caf\xe9")
    assert "not UTF-8" in fails(capsys, model, "--text", str(short), *where)
    bare = str(save_llama(tmp_path / "bare", bos=False))
    assert "has no BOS token" in fails(capsys, bare, *words, "--bos")
    lambada = ["--lambada", write_lines(tmp_path / "l.jsonl", [*LAMBADA, {"txt": "a b"}])]
    assert "line 6: no field 'text'" in fails(capsys, model, *lambada, *where)
    assert "stride is for a text" in fails(capsys, model, *lambada, "--stride", "5", *where)
    assert "must not be negative" in fails(capsys, model, *lambada, "--limit=-2", *where)
    assert not out.exists()
    assert not list(tmp_path.glob(".out*"))


@needs_lm_eval
def test_an_answer_longer_than_the_context_is_one_line(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    lambada = write_lines(tmp_path / "l.jsonl", [{"text": "a " + "b" * 80}])
    out = tmp_path / "out"
    message = fails(capsys, str(llama), "--lambada", lambada, "--out", str(out))
    assert "answer is 81 of llama's tokens, and its context holds 64" in message
    assert not out.exists()


def test_a_name_is_escaped_in_the_page(text: Path, llama: Path, tmp_path: Path) -> None:
    evil = llama.rename(tmp_path / "<img src=x onerror=alert(1)>")
    out = tmp_path / "out"
    words = ["--text", str(text / "000.txt"), "--length", "16", "--num_sequences", "2"]
    assert main(["evaluate", str(evil), *words, "--out", str(out)]) == 0
    assert "<img src=x" not in (out / "report.html").read_text()
