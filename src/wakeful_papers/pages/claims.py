"""The page of many exhibits: what became of every claim, paper by paper."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from wakeful.pages.page import listed, write_page
from wakeful_papers.exhibits.judge import Fate, Judged
from wakeful_papers.pages.reproduction import OUTCOMES, Found, counted, next_scale, told_apart


@dataclass(frozen=True)
class _Row:
    """An exhibit on the page."""

    judged: Judged
    link: str
    counts: Mapping[Fate, int]
    found: Sequence[Found]


def write_claims(path: Path, exhibits: Mapping[Path, Judged], left_out: Sequence[str] = ()) -> Path:
    """Write one page of exhibits, each by its folder; an old page stays until the new one is whole.

    `left_out` says which could not be run, and why.
    """
    papers: dict[str, list[_Row]] = {}
    for folder, judged in exhibits.items():
        row = _Row(
            judged, _link(folder / "report.html", path), counted(judged.verdicts),
            [Found.of(each) for each in judged.verdicts],
        )  # fmt: skip
        papers.setdefault(judged.paper, []).append(row)
    scales = {judged.scale for judged in exhibits.values()}
    counts = _all(exhibits.values())
    return write_page(
        path,
        "claims",
        package="wakeful_papers.pages",
        title="What the papers claim, judged here",
        headlines=[
            f"In {len(exhibits)} exhibits at {listed(sorted(scales))} scale: "
            f"{_told(exhibits.values())}"
        ],
        steps=next_scale("PAPER/EXHIBIT", scales, counts),
        outcomes=OUTCOMES,
        papers={paper: (rows, _told(row.judged for row in rows)) for paper, rows in papers.items()},
        left_out=left_out,
    )


def _all(exhibits: Iterable[Judged]) -> dict[Fate, int]:
    return counted(verdict for judged in exhibits for verdict in judged.verdicts)


def _told(exhibits: Iterable[Judged]) -> str:
    return told_apart([(one.basis, one.outcome) for judged in exhibits for one in judged.verdicts])


def _link(page: Path, here: Path) -> str:
    return quote(Path(os.path.relpath(page, here.parent)).as_posix())
