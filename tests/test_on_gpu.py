"""The script for a GPU, on machines that have none: its plan, its clock and what it leaves."""

import dataclasses
import json
import subprocess
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import on_gpu, speed
from benchmarks.models import CPU, Shape
from benchmarks.on_gpu import (
    LEAST_STEPS,
    QUESTIONS,
    TOKENS_A_STEP,
    TOTAL,
    Step,
    asked,
    bytes_of,
    carry_out,
    main,
    steps_for,
)

from wakeful.config.schema import Config, config_from_table
from wakeful.config.tables import merge_over_preset
from wakeful.errors import WakefulError
from wakeful_papers.exhibits.size import run_size

BIG = 400_000_000
"""Bytes of a text that lasts."""


def trained(step: Step) -> Config:
    """Return what the rows of a step's comparison have."""
    table = tomllib.loads(step.comparison)
    rows = {key: each for key, each in table.items() if key not in ("seeds", "variants")}
    return config_from_table(merge_over_preset(rows, step.name))


def test_the_plan_is_of_25_minutes_and_asks_large_models_most_valuable_first() -> None:
    steps = steps_for(80 * 10**9, "python-stdlib", BIG, Path("gpu"))
    assert steps == steps_for(80 * 10**9, "python-stdlib", BIG, Path("gpu"))
    assert [step.name for step in steps] == [
        "speed", "value residuals: value-residual-82m",
        "softmax-1 and OrthoAdam: activation-gpt2-130m", "tests", "ratios",
    ]  # fmt: skip
    assert sum(step.seconds for step in steps) <= TOTAL
    for step in steps[1:3]:
        config = trained(step)
        assert run_size(config).parameters > 20e6  # what an H100 is busy with
        assert config.train.steps >= LEAST_STEPS
        assert config.train.batch_size * config.train.length == TOKENS_A_STEP
        assert (config.train.device, config.train.dtype) == ("cuda", "bfloat16")
        assert config.data.source == "python-stdlib"
    assert set(tomllib.loads(steps[1].comparison)["variants"]) == {
        "vanilla", "resformer", "svformer",
    }  # fmt: skip


def test_a_question_is_asked_of_the_largest_model_that_fits() -> None:
    values = QUESTIONS[0]

    def preset(memory: float, seconds: float, size: int = BIG) -> tuple[str, int]:
        step = asked(dataclasses.replace(values, seconds=seconds), int(memory), "x", size, Path())
        return step.name.partition(": ")[2], trained(step).train.steps

    assert preset(100e9, 1e5)[0] == "value-residual-468m"
    assert preset(9e9, 1e5)[0] == "value-residual-82m"  # not into this memory
    assert preset(100e9, 1.0)[0] == "value-residual-2m"  # nor into this time
    few = 3 * TOKENS_A_STEP * 600 // 4  # a text of so many bytes lasts four times for 600 steps
    assert preset(100e9, 1e5, few) == ("value-residual-468m", 600)
    with pytest.raises(WakefulError, match=r"value residuals: no model fits into 0\.0 GB"):
        preset(1000, 1e5)


@pytest.mark.slow
def test_the_smoke_path_runs_on_a_cpu(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.mkdir()
    for number in range(30):
        (text / f"{number}.txt").write_text(f"{number} is a number, and so is {number**2}. " * 90)
    assert main([str(tmp_path / "out"), "--text", str(text), "--smoke"]) == 0
    found = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert [each["status"] for each in found] == ["done", "done"]
    assert (tmp_path / "out" / "value-residual-2m" / "report.html").is_file()
    assert bytes_of(str(text)) == sum(file.stat().st_size for file in text.iterdir())
    assert main([str(tmp_path / "no"), "--text", str(tmp_path / "none"), "--smoke"]) == 1


def test_each_step_leaves_its_results_before_the_next_begins(tmp_path: Path) -> None:
    now, seen = [0.0], []

    def run(command: tuple[str, ...], *, stdout: Any, stderr: Any, timeout: float) -> Any:
        summary = tmp_path / "summary.json"
        seen.append(len(json.loads(summary.read_text())) if summary.exists() else 0)
        now[0] += min(timeout, float(command[1]))
        stdout.write(b"first\nlast of " + command[0].encode() + b"\n\n")
        if float(command[1]) > timeout:
            raise subprocess.TimeoutExpired(command, timeout)
        return SimpleNamespace(returncode=int(command[2]))

    steps = [
        Step("a", 50, ("a", "10", "0")), Step("b/c", 50, ("b", "20", "3")),
        Step("d", 50, ("d", "70", "0")), Step("e", 50, ("e", "70", "0")),
        Step("f", 5, ("f", "1", "0")),
    ]  # fmt: skip
    found = carry_out(steps, tmp_path, run=run, clock=lambda: now[0], total=100)
    assert seen == [0, 1, 2, 3]
    assert [each.status for each in found] == [
        "done", "failed (3)", "cut off after 50 s", "cut off after 20 s", "no time left",
    ]  # fmt: skip
    assert [each.seconds for each in found] == [10, 20, 50, 20, 0]
    assert found[1].last == "last of b"
    assert (tmp_path / "b-c.txt").read_text().startswith("first\n")
    assert json.loads((tmp_path / "summary.json").read_text())[4]["name"] == "f"


def test_without_a_gpu_it_says_so_in_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main([str(tmp_path / "out")]) == 1
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert "there is no GPU" in said
    assert not (tmp_path / "out").exists()
    assert list(speed.ratios()) == []


def test_with_a_gpu_it_runs_the_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 * 10**9, 80 * 10**9))
    ran: list[str] = []

    def done(steps: list[Step], folder: Path) -> list[Any]:
        ran.extend(step.name for step in steps)
        return [SimpleNamespace(status="done") for _ in steps]

    monkeypatch.setattr(on_gpu, "carry_out", done)
    assert main([str(tmp_path)]) == 0
    assert ran[0] == "speed"


def test_a_speed_is_a_share_of_the_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(2, 2, 32, 64, 64, 16)
    monkeypatch.setattr(speed, "peak_flops", lambda _device: 1e12)
    monkeypatch.setattr(torch, "compile", lambda model: model)
    tried: list[int] = []
    real = speed._share

    def tight(name: str, shape: Shape, batch: int, *rest: Any) -> Any:
        tried.append(batch)
        if batch > 2:
            raise torch.OutOfMemoryError("no room")
        return real(name, shape, batch, *rest)

    monkeypatch.setattr(speed, "_share", tight)
    row = speed.share("tiny", shape, 8, ">= 0.4", CPU)
    assert tried == [8, 4, 2]
    assert "2 sequences" in row.name
    assert row.low <= row.ratio <= row.high
    assert row.ratio == pytest.approx(row.seconds / row.peer_seconds)
