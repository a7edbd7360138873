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
    """Write a table of results, one row per model, to results.FORMAT in `folder`, for each of the
    `formats` csv, tex and md; return the paths.

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
    """Return a frame as a Markdown table, figures aligned right."""
    names, *rows = _format_rows(frame)
    alignment = ["---", *("---:" for _ in names[1:])]
    table = ""
    for cells in (names, alignment, *rows):
        line = " | ".join(cell.replace("|", r"\|") for cell in cells)
        table += f"| {line} |\n"
    return f"{table}\nIn brackets the {INTERVAL}.\n"


def _latex(frame: pl.DataFrame) -> str:
    """Return a frame as a LaTeX tabular, figures aligned right."""
    names, *rows = ([_escape_latex(cell) for cell in line] for line in _format_rows(frame))
    lines = [" & ".join(line) + r" \\" for line in (names, *rows)]
    lines.insert(1, r"\hline")
    head = rf"\begin{{tabular}}{{l{'r' * (len(names) - 1)}}}"
    body = "\n".join([head, r"\hline", *lines, r"\hline", r"\end{tabular}"])
    return f"% In brackets the {INTERVAL}.\n{body}\n"


def _escape_latex(text: str) -> str:
    return "".join(_LATEX.get(char, char) for char in text)


def _format_rows(frame: pl.DataFrame) -> Iterator[list[str]]:
    """Yield the names of the columns, and then every row, as text: a figure's interval stands in
    its cell, "figure [low, high]", and has no columns.
    """
    names = [name for name in frame.columns if not name.endswith(_ENDS)]
    yield [name.replace("_", " ") for name in names]
    for row in frame.iter_rows(named=True):
        yield [_format_figure(row, name) for name in names]


def _format_figure(row: Mapping[str, Any], name: str) -> str:
    """Return the cell of column `name` in a row: a text, a count, or a figure with its interval,
    rounded to the digits that the interval's width allows.
    """
    value, low, high = row[name], row.get(f"{name}_low"), row.get(f"{name}_high")
    if isinstance(value, int):
        return f"{value:,}"
    if not isinstance(value, float):
        return "" if value is None else str(value)
    if math.isnan(value):
        return "–"
    sign = "+" if name.startswith(("difference", "minus")) else ""
    if low is None or high is None or not math.isfinite(high - low) or high == low:
        return format_estimate(value, None, sign)
    half_width = (high - low) / 2
    middle, start, end = (round_to_error(number, half_width, sign) for number in (value, low, high))
    return f"{middle} [{start}, {end}]"


WRITERS: Mapping[str, Callable[[pl.DataFrame], str]] = {
    "csv": _csv, "tex": _latex, "md": _markdown,
}  # fmt: skip


def interval_columns(frame: pl.DataFrame, left_out: Sequence[str] = ()) -> pl.DataFrame:
    """Return the frame without the columns `left_out` and those of standard errors, which the
    intervals make superfluous.
    """
    errors = [name for name in frame.columns if name.endswith("_error")]
    return frame.drop(*errors, *left_out)
