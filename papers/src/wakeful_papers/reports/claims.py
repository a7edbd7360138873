"""What is told of many exhibits: what became of every claim, paper by paper."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from wakeful.reports.value import BulletList, Cell, Fold, Part, Report, Section, Table, Text, listed
from wakeful_papers.exhibits.judge import Judged
from wakeful_papers.reports.reproduction import (
    JUDGED,
    OUTCOMES,
    READING,
    claim_cells,
    counted,
    grounds,
    next_scale,
    told_apart,
)


def claims_report(
    exhibits: Mapping[Path, Judged], page: Path, left_out: Sequence[str] = ()
) -> Report:
    """Return what is told of exhibits, each by its folder, on a page that is written there.

    `left_out` says which could not be run, and why.
    """
    papers: dict[str, dict[str, Judged]] = {}
    for folder, judged in exhibits.items():
        link = Path(os.path.relpath(folder / "report.html", page.parent)).as_posix()
        papers.setdefault(judged.paper, {})[quote(link)] = judged
    scales = {judged.scale for judged in exhibits.values()}
    counts = counted(each for judged in exhibits.values() for each in judged.verdicts)
    told = f"In {len(exhibits)} exhibits at {listed(sorted(scales))} scale: "
    return Report(
        "What the papers claim, judged here",
        [told + _told(exhibits.values())],
        next_scale("PAPER/EXHIBIT", scales, counts),
        [
            *(Section(paper, _of_paper(paper, found), brief=True)
              for paper, found in papers.items()),
            Section("How to read this", [
                Text("A verdict is of its scale and text, and speaks for no other. "
                     f"{READING} Of this many claims one in twenty would stand out by chance."),
            ]),
            *([Section("", [BulletList([f"left out: {line}" for line in left_out])], brief=True)]
              if left_out else []),
        ],
    )  # fmt: skip


def _of_paper(paper: str, found: Mapping[str, Judged]) -> list[Part]:
    names = {link: judged.exhibit.split("/")[1] for link, judged in found.items()}
    overview: list[list[Cell | str]] = []
    for link, judged in found.items():
        counts = counted(judged.verdicts)
        overview.append([
            Cell(names[link], link=link),
            *(str(counts[outcome] or "–") for outcome in OUTCOMES),
            Cell(judged.claim, under=[judged.headline]),
        ])  # fmt: skip
    claims = [
        [Cell(names[link], link=link),
         Cell(each.says, each.group, grounds(each)), *claim_cells(each)]
        for link, judged in found.items() for each in judged.verdicts
    ]  # fmt: skip
    return [
        Text(_told(found.values())),
        Table(["exhibit", *OUTCOMES, "what it claims"], overview, f"Exhibits of {paper}",
              "overview", terminal=OUTCOMES),
        Fold(f"Every claim of {paper}", [
            Table(["exhibit", "claim", *JUDGED], claims, f"Claims of {paper}", "claims judged"),
        ]),
    ]  # fmt: skip


def _told(exhibits: Iterable[Judged]) -> str:
    return told_apart([(one.basis, one.outcome) for judged in exhibits for one in judged.verdicts])
