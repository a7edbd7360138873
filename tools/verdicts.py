"""Write docs/verdicts.md, every claim of finished exhibits: python tools/verdicts.py FOLDER..."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from itertools import groupby
from pathlib import Path
from typing import get_args

from wakeful.estimates import with_error
from wakeful.exhibits.exhibit import Scale, natural
from wakeful.exhibits.judge import Judged, Verdict
from wakeful.pages.reproduction import Found, counted, in_words
from wakeful.runs.run import Run, read_record

PAGE = Path(__file__).resolve().parent.parent / "docs" / "verdicts.md"
HEAD = """\
# Verdicts on every claim

What `wakeful reproduce EXHIBIT` found of each claim, paper by paper; [findings](findings.md) say
what surprised. A verdict is of its scale and text, and speaks for no other: the tiny scale trains
models of 0.1 to 1 million parameters for some hundred steps, which shows what a method does early
and says little of where it ends: of the arena's claims, on a ground where no sink grows, three of
100 steps (MUDD, attention residuals, hyper-connections) do not hold over 1,000.

Differences are paired over seeds, ± one standard error. A direction is confirmed or reversed where
the 95% interval (Student's t) leaves out zero; "same" is confirmed where the interval lies within
the share that counts as none. After a published size, "inside" says that it lies in our interval,
"outside" that it does not. A figure that rests on fewer seeds than others of its exhibit says how
many. Of this many claims one in twenty would stand out by chance. At the tiny scale the sizes of a
paper are one model, so exhibits that differ only in size repeat each other, and runs that two
exhibits share are trained once.
"""


def main(folders: Iterable[Path], day: str) -> None:
    """Write the page of these exhibits' folders."""
    exhibits = [
        read_record(Judged, folder / "summary.json")
        for folder in folders
        if Run.open(folder).header.status == "done"
    ]
    PAGE.write_text("\n".join(lines(exhibits, day)), encoding="utf-8")


def lines(exhibits: Sequence[Judged], day: str) -> Iterator[str]:
    """Yield the page's lines."""
    yield HEAD
    yield f"{day}. {_told(exhibits)}\n"
    ordered = sorted(exhibits, key=lambda judged: (judged.paper, natural(judged.exhibit)))
    for paper, group in groupby(ordered, key=lambda judged: judged.paper):
        of_paper = list(group)
        yield f"## {paper}\n\n{_told(of_paper)}\n"
        for judged in of_paper:
            yield from _exhibit(judged)


def _told(exhibits: Sequence[Judged]) -> str:
    """Return what came out at each scale: verdicts of two do not add up."""
    sentences: list[str] = []
    for scale in get_args(Scale):
        at_it = [judged for judged in exhibits if judged.scale == scale]
        every = [verdict for judged in at_it for verdict in judged.verdicts]
        if at_it:
            sentences.append(
                f"{scale.capitalize()} scale, {len(at_it)} exhibit{'s' * (len(at_it) > 1)}, "
                f"{len(every)} claims: "
                f"{in_words(counted(every))}."
            )
    return " ".join(sentences)


def _exhibit(judged: Judged) -> Iterator[str]:
    yield f"**{judged.exhibit}** — {judged.headline}\n"
    yield "| claim | published | here | verdict |"
    yield "|---|---|---|---|"
    seeds = max((verdict.seeds for verdict in judged.verdicts), default=0)
    for verdict in judged.verdicts:
        where = f" ({verdict.group})" if verdict.group else ""
        here = _here(verdict, seeds)
        cells = (f"{verdict.says}{where}", _published(verdict), here, verdict.outcome)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _published(verdict: Verdict) -> str:
    if verdict.published is None:
        return verdict.direction
    place = {True: ", inside", False: ", outside", None: ""}[verdict.size]
    return f"{verdict.direction}, {verdict.published:+.4g}".replace("-", "−") + place


def _here(verdict: Verdict, seeds: int) -> str:
    """Return the difference, and of how many seeds it is where those of the exhibit are more."""
    if verdict.difference is None:
        return "not measured"
    if verdict.error is None:
        return Found.of(verdict).difference
    told = with_error(verdict.difference, verdict.error, "+")
    return told if verdict.seeds == seeds else f"{told}, {verdict.seeds} of {seeds} seeds"


if __name__ == "__main__":
    main(map(Path, sys.argv[1:]), date.today().isoformat())
