"""Progress on a terminal and in a log."""

import io

import pytest
from rich.console import Console

from wakeful import display as progress
from wakeful.display import Bars, Lines, display


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=160, _environ={}), out


def test_bars_show_work_of_unknown_size_and_names_like_markup() -> None:
    terminal, out = console(terminal=True)
    with display(terminal, "my[/run]") as show:
        assert isinstance(show, Bars)
        show.stage("reading", 2_000_000, None)
        show.stage("reading", 3_000_000, 3_000_000)
        show.step(1, 4, 5.25, 1234.0)
        show.note("a note [/with] brackets")
        show.step(4, 4, 4.5, 1234.0)
    shown = out.getvalue()
    for words in ("my[/run]", "3.0 MB", "4/4", "loss  4.500", "1,234 tokens/s", "[/with]"):
        assert words in shown


def test_a_log_has_a_line_now_and_then_and_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    log, out = console(terminal=False)
    with display(log, "run") as show:
        assert isinstance(show, Lines)
        for step in range(1, 31):
            show.step(step, 30, 6 - step / 10, 500.0)
            now[0] += 1.0
    lines = out.getvalue().splitlines()
    assert [line.split("step ")[1].split("/")[0] for line in lines] == ["1", "11", "21", "30"]
    # After 10 seconds and 10 steps, 19 steps take 19 seconds.
    assert lines[1] == "run: step 11/30  loss 4.900  500 tokens/s  19 s left"


def test_a_log_tells_of_other_work_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.time, "monotonic", lambda: 1000.0)
    log, out = console(terminal=False)
    with display(log, "run") as show:
        show.stage("reading", 1_000_000, None)
        show.stage("reading", 2_000_000, None)
        show.stage("reading", 3_000_000, 3_000_000)
    assert out.getvalue().splitlines() == ["reading: 1.0 MB", "reading: 3.0 of 3.0 MB"]
