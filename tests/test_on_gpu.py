"""The script for a GPU, on machines that have none: its plan, its clock and what it leaves."""

import json
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from benchmarks import on_gpu, speed
from benchmarks.models import CPU, Shape
from benchmarks.on_gpu import TOTAL, Step, carry_out, fitting, main, steps_for

from wakeful.errors import WakefulError


def test_the_plan_is_of_25_minutes_and_runs_what_is_worth_most_first() -> None:
    steps = steps_for(80 * 10**9)
    assert [step.name for step in steps] == [
        "speed", "tests", "activation/table2", "value-residual/table5", "ratios", "arena-124m",
    ]  # fmt: skip
    assert sum(step.seconds for step in steps) <= TOTAL
    for step in steps[2:4]:
        words = step.command
        assert words[words.index("--scale") + 1] == "small"
        assert int(words[words.index("--steps") + 1]) >= 100


def test_an_exhibit_takes_the_largest_scale_that_fits() -> None:
    name = "value-residual/table5"
    scale, steps = fitting(name, 1e9, 100 * 10**9)
    assert (scale, steps) == ("paper", 10_000)
    assert fitting(name, 1e9, 10**9)[0] == "small"  # not into this memory
    assert fitting(name, 1.0, 100 * 10**9) == ("tiny", 2)  # nor into this time
    with pytest.raises(WakefulError, match=r"does not fit into 0\.0 GB at any scale"):
        fitting(name, 1e9, 1000)


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
