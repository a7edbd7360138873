"""The page of many exhibits: what became of every claim, paper by paper."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args
from urllib.parse import quote

from wakeful.exhibits.judge import Judged, Outcome
from wakeful.pages.page import Step, listed, write_page
from wakeful.pages.reproduction import Found

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)
_NEXT = {"tiny": "small", "small": "paper"}


@dataclass(frozen=True)
class _Row:
    """An exhibit on the page."""

    judged: Judged
    link: str
    counts: Mapping[str, int]
    found: Sequence[Found]


def write_claims(path: Path, exhibits: Mapping[Path, Judged], left_out: Sequence[str] = ()) -> Path:
    """Write one page of exhibits, each by its folder; an old page stays until the new one is whole.

    `left_out` says which could not be run, and why.
    """
    papers: dict[str, list[_Row]] = {}
    for folder, judged in exhibits.items():
        row = _Row(
            judged, _link(folder / "report.html", path), counted([judged]),
            [Found.of(each) for each in judged.verdicts],
        )  # fmt: skip
        papers.setdefault(judged.paper, []).append(row)
    scales = {judged.scale for judged in exhibits.values()}
    counts = counted(exhibits.values())
    return write_page(
        path,
        "claims",
        title="What the papers claim, judged here",
        headlines=[_headline(counts, scales, len(exhibits))],
        steps=_larger(scales, counts),
        outcomes=OUTCOMES,
        papers={
            paper: (rows, counted(row.judged for row in rows)) for paper, rows in papers.items()
        },
        left_out=left_out,
    )


def counted(exhibits: Iterable[Judged]) -> dict[str, int]:
    """Return how many claims of exhibits came out how."""
    found = dict.fromkeys(map(str, OUTCOMES), 0)
    for judged in exhibits:
        for verdict in judged.verdicts:
            found[verdict.outcome] += 1
    return found


def _headline(counts: Mapping[str, int], scales: set[str], exhibits: int) -> str:
    told = listed(f"{count} {outcome}" for outcome, count in counts.items() if count)
    return (
        f"Of {sum(counts.values())} claims in {exhibits} exhibits at {listed(sorted(scales))} "
        f"scale: {told or 'none judged'}."
    )


def _larger(scales: set[str], counts: Mapping[str, int]) -> list[Step]:
    if len(scales) > 1 or not counts["not resolved"]:
        return []
    larger = _NEXT.get(next(iter(scales)))
    if larger is None:
        return []
    command = f"wakeful reproduce PAPER/EXHIBIT --scale {larger}"
    return [Step("try what is not resolved at the next scale", command)]


def _link(page: Path, here: Path) -> str:
    return quote(Path(os.path.relpath(page, here.parent)).as_posix())
