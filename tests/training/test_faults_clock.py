"""The machine's clock may jump, and files may bear any date: nothing hangs on either."""

import ast
import io
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import wakeful
import wakeful.runs.run
from training.faults import left_by
from training.runs import tiny, write_text
from training.test_loop import stop_after
from wakeful.config.schema import Config
from wakeful.data.preparing import prepare_data
from wakeful.data.sources import read_documents
from wakeful.loading.load import read_decoder
from wakeful.runs import checkpoint
from wakeful.runs.run import Run
from wakeful.terminal.display import ProgressLines
from wakeful.training.loop import train_run

DATES = {"1970": 0, "before 1970": -86_400, "2106": 2**32 - 1, "year 2200": 7_258_118_400}
"""Seconds since 1970."""


class Jumping:
    """A clock that a day is taken from, or added to, whenever it is read."""

    def __init__(self, days: float) -> None:
        self.seconds, self.jump = time.time(), 86_400 * days

    def time(self) -> float:
        self.seconds += self.jump
        return self.seconds

    def time_ns(self) -> int:
        return int(self.time() * 1e9)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        clock = self

        class Dates(datetime):
            @classmethod
            def now(cls, tz: Any = None) -> "Dates":
                start = datetime(1970, 1, 1, tzinfo=tz or UTC)
                return start + timedelta(seconds=clock.time())  # pyright: ignore[reportReturnType]

        patch.setattr(time, "time", self.time)
        patch.setattr(time, "time_ns", self.time_ns)
        patch.setattr(wakeful.runs.run, "datetime", Dates)


def date(folder: Path, seconds: int) -> None:
    """Give everything below a folder one date."""
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, (seconds, seconds))


def assert_time_goes_on(run: Run) -> None:
    rows = [row for row in run.metrics() if row["kind"] == "train"]
    seconds = [row["seconds"] for row in rows]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0
    assert seconds[-1] < 600  # and not days
    assert all(row["tokens_per_second"] > 0 for row in rows)
    summary = run.read_json("summary.json")
    assert 0 < summary["seconds"] < 600
    assert summary["tokens_per_second"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("days", [-1.0, 1.0])
def test_a_clock_that_jumps_in_a_run_changes_nothing(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncut: dict[str, Any], days: float
) -> None:
    with monkeypatch.context() as patch:
        Jumping(days).install(patch)
        run = train_run(tiny(text), tmp_path / "run")
    assert left_by(run) == uncut
    assert_time_goes_on(run)
    assert datetime.fromisoformat(run.header.created).tzinfo is not None


@pytest.mark.slow
@pytest.mark.parametrize("when", DATES)
def test_a_clock_that_jumps_before_a_run_is_resumed_changes_nothing(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncut: dict[str, Any], when: str
) -> None:
    path = tmp_path / "run"
    with monkeypatch.context() as patch:
        stop_after(patch, 7)
        with pytest.raises(RuntimeError, match="stop"):
            train_run(tiny(text), path)
    assert checkpoint.steps(path / "checkpoints") == [3, 6]
    # A lock from another time is not a lock, and the newest checkpoint is that of the last step.
    date(path, DATES[when])
    os.utime(path / "checkpoints" / "step-00000003", (2**33, 2**33))
    assert read_decoder(path, dtype="auto").step == 6
    with monkeypatch.context() as patch:
        Jumping(-1000.0).install(patch)
        run = train_run(Config(), path, resume=True)
    assert left_by(run) == uncut
    assert_time_goes_on(run)


@pytest.mark.parametrize("when", DATES)
def test_text_of_any_date_is_read_and_kept(tmp_path: Path, when: str) -> None:
    text, cache = write_text(tmp_path / "text"), tmp_path / "cache"
    date(text, DATES[when])
    options: dict[str, Any] = {"vocab_size": 280, "cache_dir": cache}
    first = prepare_data(str(text), **options)
    assert prepare_data(str(text), **options).folder == first.folder
    # Changed and dated back: the time differs, whichever is the later.
    file = text / "000.txt"
    file.write_text(file.read_text().replace("x", "y"))
    os.utime(file, (DATES[when] - 1, DATES[when] - 1))
    again = prepare_data(str(text), **options)
    assert again.folder != first.folder
    assert again.corpus_sha256 != first.corpus_sha256
    assert len(list(read_documents(str(text)))) == 60


@pytest.mark.parametrize("days", [-1.0, 1.0])
def test_what_is_left_to_do_follows_no_clock_that_jumps(
    days: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = io.StringIO()
    lines = ProgressLines(Console(file=output, width=200), "x")
    with monkeypatch.context() as patch:
        Jumping(days).install(patch)
        lines.begin(0, 4, "training")
        for step in range(1, 4):
            lines._last_line_time.clear()  # so that every step is shown
            lines.step(step, 4, 1.0, 100.0)
    assert output.getvalue().count("  1 s left") == 3


@pytest.mark.slow
def test_no_duration_is_measured_by_the_clock_on_the_wall() -> None:
    walls = {"time.time", "time.time_ns", "datetime.utcnow", "time.localtime"}
    sources = list(Path(wakeful.__file__).parent.rglob("*.py"))
    assert len(sources) > 100
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                assert ast.unparse(node.func) not in walls, f"{path}:{node.lineno}"
