"""Diagnosis and evaluation on two processes: what one computes, and how they end together."""

import importlib.util
import json
import subprocess
import time
from pathlib import Path

import polars as pl
import pytest
from polars.testing import assert_frame_equal

from evaluation.models import CHOICES, LAMBADA, save_llama, write_lines
from training import processes
from training.runs import tiny, write_text
from wakeful.cli import main
from wakeful.runs.run import Run
from wakeful.training.loop import train

HAS_LM_EVAL = importlib.util.find_spec("lm_eval") is not None
needs_lm_eval = pytest.mark.skipif(not HAS_LM_EVAL, reason="needs lm-eval")
INTEGERS = ("rank", "lazy", "near_rank_1")
ORDER = {"rel_tol": 1e-12, "abs_tol": 1e-15}
"""How far float64 sums in another order may be."""
BATCHES = {"rel_tol": 1e-5, "abs_tol": 1e-6}
"""How far float32 logits of another batch may be: lm-eval pads questions to the batch's longest."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with text, questions, a Llama and a run of ours."""
    here = tmp_path_factory.mktemp("spread")
    write_text(here / "text")
    save_llama(here / "llama")
    write_lines(here / "l.jsonl", LAMBADA)
    write_lines(here / "c.jsonl", CHOICES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WAKEFUL_CACHE", str(here / "cache"))
        train(tiny(here / "text", model={"max_length": 200}), here / "ours")
    return here


def commands(folder: Path, out: str) -> dict[str, list[str]]:
    """Return each case's command, which writes the folder OUT/CASE."""
    models = [str(folder / "llama"), str(folder / "ours")]
    words = ["--text", str(folder / "text")]
    pictures = ["--layers", "0", "1", "--heads", "0", "1"]
    cases = {
        "three": ["diagnose", *models, *words, "--length", "24", "--num_sequences", "3", *pictures],
        "one": ["diagnose", models[0], *words, "--length", "24", "--num_sequences", "1", "--bos"],
        "text": ["evaluate", *models, "--text", str(folder / "text" / "000.txt"), "--length", "24",
                 "--stride", "16", "--batch_size", "3"],
        "few": ["evaluate", models[0], *words, "--length", "24", "--num_sequences", "2", "--bos"],
    }  # fmt: skip
    if HAS_LM_EVAL:
        cases["tasks"] = [
            "evaluate", *models, "--lambada", str(folder / "l.jsonl"),
            "--choices", str(folder / "c.jsonl"), "--batch_size", "2",
        ]  # fmt: skip
    return {name: [*case, "--out", str(folder / out / name)] for name, case in cases.items()}


def start(
    folder: Path, *commands: list[str], harm: tuple[str, str, int] | None = None
) -> subprocess.Popen[str]:
    file = folder / "job.json"
    file.write_text(json.dumps({"commands": commands, "harm": harm}))
    return processes.start(2, str(file), module="spread_jobs")


@pytest.fixture(scope="module")
def spoken(folder: Path) -> str:
    """Run every case on one process and on two; return what the two printed."""
    for command in commands(folder, "alone").values():
        assert main(command) == 0
    wanted = commands(folder, "spread").values()
    status, out, errors = processes.ended(start(folder, *wanted))
    assert status == 0, errors
    assert out.count("process 0: 0") == out.count("process 1: 0") == len(wanted)
    return out


def tables(folder: Path, case: str, name: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    alone, spread = (pl.read_parquet(folder / out / case / name) for out in ("alone", "spread"))
    return spread, alone


@pytest.mark.parametrize("case", ["three", "one"])
def test_a_diagnosis_is_that_of_one_process(folder: Path, spoken: str, case: str) -> None:
    spread, alone = tables(folder, case, "diagnosis.parquet")
    assert_frame_equal(spread, alone, check_exact=False, **ORDER)  # rows and columns in order too
    chosen = pl.col("metric").is_in(INTEGERS)
    assert spread.filter(chosen)["value"].equals(alone.filter(chosen)["value"])
    assert alone["standard_error"].is_null().all() == (case == "one")
    for metric in ("attention_picture", "mean_attention", "hidden_picture", "outlier_channel"):
        assert metric in set(spread["metric"])
    here, there = (
        json.loads((folder / out / case / "summary.json").read_text())
        for out in ("spread", "alone")
    )
    for mine, theirs in zip(here["models"], there["models"], strict=True):
        losses = [value for key, value in theirs.items() if key.startswith("loss")]
        assert losses == [value for key, value in mine.items() if key.startswith("loss")] != []
    assert "2 processes of 1 thread;" in here["method"]["Machine"]
    assert "processes" not in there["method"]["Machine"]


@pytest.mark.parametrize("case", ["text", "few"])
def test_a_perplexity_is_that_of_one_process_to_the_bit(
    folder: Path, spoken: str, case: str
) -> None:
    spread, alone = tables(folder, case, "evaluation.parquet")
    assert_frame_equal(spread, alone, check_exact=True)


@needs_lm_eval
def test_answers_are_those_of_one_process(folder: Path, spoken: str) -> None:
    spread, alone = tables(folder, "tasks", "evaluation.parquet")
    assert_frame_equal(spread, alone, check_exact=False, **BATCHES)
    chosen = pl.col("metric").str.starts_with("acc")
    assert spread.filter(chosen)["value"].equals(alone.filter(chosen)["value"])


def test_the_first_process_alone_writes_and_speaks(folder: Path, spoken: str) -> None:
    for case in commands(folder, "spread"):
        run = Run.open(folder / "spread" / case)
        assert run.header.status == "done"
        assert run.read_json("environment.json")["processes"] == 2
        assert (run.path / "report.html").is_file()
        assert spoken.count(f"report: {run.path}") == 1
        assert not list(run.path.parent.glob(f".{case}*"))
    assert spoken.count("loading") == 2 * len(commands(folder, "")) - 2


@pytest.mark.parametrize(
    ("what", "part", "rank"),
    [
        ("fail", "sequence", 1),
        # Quickly, what a killed process does is seen in `training/test_killed_processes.py`.
        pytest.param("kill", "sequence", 1, marks=pytest.mark.slow),
        pytest.param("kill", "end", 0, marks=pytest.mark.slow),
    ],
)
def test_one_process_that_ends_ends_both_with_one_line(
    folder: Path, what: str, part: str, rank: int
) -> None:
    command = commands(folder, f"{what}-{rank}")["three"]
    began = time.monotonic()
    status, out, errors = processes.ended(start(folder, command, harm=(what, part, rank)))
    assert status == 1
    assert time.monotonic() - began < processes.ENDS_WITHIN
    (line,) = processes.said(errors, "diagnose")
    if what == "fail":
        assert line == "wakeful diagnose: what only one process met"
    else:
        assert "another process of this run is gone" in line
        assert line.endswith("start it again with the same torchrun command")
    assert "report" not in out
    assert not (folder / f"{what}-{rank}").exists()


@pytest.mark.slow
@needs_lm_eval
def test_an_answer_too_long_ends_all_and_writes_nothing(folder: Path, tmp_path: Path) -> None:
    rows = [{"text": f"a longer context than the other has {n}"} for n in range(3)]
    lambada = write_lines(tmp_path / "l.jsonl", [*rows, {"text": "a " + "b" * 80}])
    command = ["evaluate", str(folder / "llama"), "--lambada", lambada]
    running = processes.start(2, *command, "--out", str(tmp_path / "out"))
    status, out, errors = processes.ended(running)
    assert status == 1
    (line,) = processes.said(errors, "evaluate")
    assert "answer is 81 of llama's tokens, and its context holds 64" in line
    assert "report" not in out
    assert [path.name for path in tmp_path.iterdir()] == ["l.jsonl"]
