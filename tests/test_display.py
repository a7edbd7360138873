"""Progress on a terminal and in a log."""

import io

import pytest
from rich.console import Console

from wakeful.terminal import display as progress
from wakeful.terminal.display import (
    ProgressBars,
    ProgressLines,
    format_duration,
    format_size,
    open_display,
)


def console(*, terminal: bool) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, force_terminal=terminal, width=160, _environ={}), out


def test_bars_show_work_of_unknown_size_and_names_like_markup() -> None:
    terminal, out = console(terminal=True)
    with open_display(terminal, "my[/run]") as show:
        assert isinstance(show, ProgressBars)
        show.stage("reading", 2_000_000, None)
        show.stage("reading", 3_000_000, 3_000_000)
        show.step(1, 4, 5.25, 1234.0)
        show.note("a note [/with] brackets")
        show.step(4, 4, 4.5, 1234.0)
    shown = out.getvalue()
    for words in (
        "my[/run]",
        "3.0 MB",
        "4/4",
        "loss  4.500",
        "1,234 tokens/s",
        "[/with]",
    ):
        assert words in shown


def test_a_log_has_a_line_now_and_then_and_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    log, out = console(terminal=False)
    with open_display(log, "run") as show:
        assert isinstance(show, ProgressLines)
        for step in range(1, 31):
            show.step(step, 30, 6 - step / 10, 500.0)
            now[0] += 1.0
    lines = out.getvalue().splitlines()
    assert [line.split("step ")[1].split("/")[0] for line in lines] == ["1", "11", "21", "30"]
    # Nothing is known after the first step; after 10 seconds and 10 steps, 19 steps take 19 s.
    assert lines[0] == "run: step 1/30  loss 5.900  500 tokens/s"
    assert lines[1] == "run: step 11/30  loss 4.900  500 tokens/s  19 s left"


def test_the_total_is_said_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    log, out = console(terminal=False)
    with open_display(log, "run") as show:
        show.begin(0, 30, "30 steps, about 60 s")
        now[0] += 2.0
        show.step(1, 30, 5.9, 500.0)
        show.count("sequences", 0, 4)
        now[0] += 3.0
        show.count("sequences", 1, 4)
        now[0] += 30.0
        show.count("sequences", 2, 4)
        show.count("sequences", 4, 4)
    assert out.getvalue().splitlines() == [
        "run: 30 steps, about 60 s",
        "run: step 1/30  loss 5.900  500 tokens/s  58 s left",
        "sequences 0 of 4",
        "sequences 2 of 4  33 s left",
        "sequences 4 of 4",
    ]
    terminal, out = console(terminal=True)
    with open_display(terminal, "run") as show:
        show.begin(0, 30, "30 steps, about 60 s")
        show.count("sequences", 0, 4)
    assert "0/30" in out.getvalue()
    assert "0/4" in out.getvalue()


def test_sizes_and_times_are_in_units_that_show_them() -> None:
    assert format_size(0, 12) == "0 of 12 bytes"
    assert format_size(12, 12) == "12 bytes"
    assert format_size(500, 40_000) == "0.5 of 40.0 kB"
    assert format_size(3_000_000, None) == "3.0 MB"
    assert format_size(0, 2_500_000_000) == "0.0 of 2.5 GB"
    assert [format_duration(seconds) for seconds in (0.2, 40, 240, 9_000, 270_000)] == [
        "1 s", "40 s", "4 min", "2.5 h", "3.1 days"
    ]  # fmt: skip


def test_nothing_is_shown_of_no_bytes() -> None:
    for terminal in (False, True):
        console_, out = console(terminal=terminal)
        with open_display(console_, "run") as show:
            show.stage("reading", 0, None)
            show.stage("reading", 0, 0)
        assert "reading" not in out.getvalue()


def test_a_log_tells_of_other_work_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.time, "monotonic", lambda: 1000.0)
    log, out = console(terminal=False)
    with open_display(log, "run") as show:
        show.stage("reading", 1_000_000, None)
        show.stage("reading", 2_000_000, None)
        show.stage("reading", 3_000_000, 3_000_000)
    assert out.getvalue().splitlines() == ["reading: 1.0 MB", "reading: 3.0 MB"]
