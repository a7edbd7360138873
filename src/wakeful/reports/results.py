"""Tables of results as files: CSV for programs, LaTeX and Markdown for papers, with intervals."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from wakeful.estimates import INTERVAL, format_estimate, round_to_error
from wakeful.reports.charts import csv_text
from wakeful.runs.run import disk_errors, replace_atomically

FILE_STEM = "results"
"""The files' name before the ending."""
_LATEX = {char: f"\\{char}" for char in "&%$#_{}"} | {
    "\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
    "−": "$-$", "×": r"$\times$",
}  # fmt: skip
_ENDS = ("_low", "_high")
"""Suffixes of the columns of an interval's ends."""


def save_results(frame: pl.DataFrame, folder: Path, formats: Iterable[str]) -> list[Path]:
    """Write a table of results, one row per model, to results.FORMAT in `folder`.

    FIGURE_low and FIGURE_high are the ends of FIGURE's 95% confidence interval: CSV keeps them as
    columns, the other formats print "figure [low, high]".
    """
    paths: list[Path] = []
    for ending in formats:
        with disk_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
        paths.append(folder / f"{FILE_STEM}.{ending}")
        with replace_atomically(paths[-1]) as temporary:
            temporary.write_text(WRITERS[ending](frame), "utf-8")
    return paths


def _csv(frame: pl.DataFrame) -> str:
    rows = frame.fill_nan(None).iter_rows()
    return csv_text([frame.columns, *rows])


def _markdown(frame: pl.DataFrame) -> str:
    names, *rows = _format_rows(frame)
    lines = [names, ["---", *("---:" for _ in names[1:])], *rows]
    table = "".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |\n" for line in lines
    )
    return f"{table}\nIn brackets the {INTERVAL}.\n"


def _latex(frame: pl.DataFrame) -> str:
    names, *rows = ([_escape(cell) for cell in line] for line in _format_rows(frame))
    lines = [" & ".join(line) + r" \\" for line in (names, *rows)]
    lines.insert(1, r"\hline")
    head = rf"\begin{{tabular}}{{l{'r' * (len(names) - 1)}}}"
    body = "\n".join([head, r"\hline", *lines, r"\hline", r"\end{tabular}"])
    return f"% In brackets the {INTERVAL}.\n{body}\n"


def _escape(text: str) -> str:
    return "".join(_LATEX.get(char, char) for char in text)


def _format_rows(frame: pl.DataFrame) -> Iterator[list[str]]:
    """Yield the names of the columns, and then every row, each figure with its interval."""
    names = [name for name in frame.columns if not name.endswith(_ENDS)]
    yield [name.replace("_", " ") for name in names]
    for row in frame.iter_rows(named=True):
        yield [_format_figure(row, name) for name in names]


def _format_figure(row: Mapping[str, Any], name: str) -> str:
    """Return a cell: a name, a count, or a figure with its interval to their digits."""
    value, low, high = row[name], *(row.get(f"{name}{end}") for end in _ENDS)
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else "" if value is None else str(value)
    if math.isnan(value):
        return "–"
    sign = "+" if name.startswith(("difference", "minus")) else ""
    if low is None or high is None or not math.isfinite(high - low) or high == low:
        return format_estimate(value, None, sign)
    middle, *ends = (round_to_error(bound, (high - low) / 2, sign) for bound in (value, low, high))
    return f"{middle} [{', '.join(ends)}]"


WRITERS: Mapping[str, Callable[[pl.DataFrame], str]] = {
    "csv": _csv, "tex": _latex, "md": _markdown,
}  # fmt: skip


def interval_columns(frame: pl.DataFrame, left_out: Sequence[str] = ()) -> pl.DataFrame:
    """Return the frame without standard errors, which the intervals stand for, and `left_out`."""
    errors = [name for name in frame.columns if name.endswith("_error")]
    return frame.drop(*errors, *left_out)
