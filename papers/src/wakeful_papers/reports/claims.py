"""The report of several exhibits: the outcome of every claim, paper by paper."""

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

from wakeful.reports.value import BulletList, Cell, Fold, Part, Report, Section, Table, Text, listed
from wakeful_papers.exhibits.judge import JudgedExhibit
from wakeful_papers.reports.reproduction import (
    COLUMNS,
    OUTCOMES,
    READING,
    claim_cells,
    count_outcomes,
    suggest_next_scale,
    summarize_outcomes,
    verdict_notes,
)


def claims_report(
    exhibits: Mapping[Path, JudgedExhibit], page: Path, omissions: Sequence[str] = ()
) -> Report:
    """Return the report of exhibits, which are given by their folders, for the path of its page.

    `omissions` are texts about exhibits that could not be run: which, and why.
    """
    papers: dict[str, dict[str, JudgedExhibit]] = {}
    for folder, exhibit in exhibits.items():
        link = Path(os.path.relpath(folder / "report.html", page.parent)).as_posix()
        papers.setdefault(exhibit.paper, {})[quote(link)] = exhibit
    scales = {exhibit.scale for exhibit in exhibits.values()}
    counts = count_outcomes(v for exhibit in exhibits.values() for v in exhibit.verdicts)
    intro = f"In {len(exhibits)} exhibits at {listed(sorted(scales))} scale: "
    return Report(
        "What the papers claim, judged here",
        [intro + _outcome_summary(exhibits.values())],
        suggest_next_scale("PAPER/EXHIBIT", scales, counts),
        [
            *(Section(paper, _paper_parts(paper, by_link), brief=True)
              for paper, by_link in papers.items()),
            Section("How to read this", [
                Text("A verdict is of its scale and text, and speaks for no other. "
                     f"{READING} Of this many claims one in twenty would stand out by chance."),
            ]),
            *([Section("", [BulletList([f"left out: {line}" for line in omissions])], brief=True)]
              if omissions else []),
        ],
    )  # fmt: skip


def _paper_parts(paper: str, exhibits: Mapping[str, JudgedExhibit]) -> list[Part]:
    """Return the tables of a paper's exhibits, which are given by the links to their pages."""
    names = {link: exhibit.exhibit.split("/")[1] for link, exhibit in exhibits.items()}
    overview: list[list[Cell | str]] = []
    for link, exhibit in exhibits.items():
        counts = count_outcomes(exhibit.verdicts)
        overview.append([
            Cell(names[link], link=link),
            *(str(counts[outcome] or "–") for outcome in OUTCOMES),
            Cell(exhibit.claim, under=[exhibit.headline]),
        ])  # fmt: skip
    claims = [
        [Cell(names[link], link=link),
         Cell(verdict.says, verdict.group, verdict_notes(verdict)), *claim_cells(verdict)]
        for link, exhibit in exhibits.items() for verdict in exhibit.verdicts
    ]  # fmt: skip
    return [
        Text(_outcome_summary(exhibits.values())),
        Table(["exhibit", *OUTCOMES, "what it claims"], overview, f"Exhibits of {paper}",
              "overview", terminal=OUTCOMES),
        Fold(f"Every claim of {paper}", [
            Table(["exhibit", "claim", *COLUMNS], claims, f"Claims of {paper}", "claims judged"),
        ]),
    ]  # fmt: skip


def _outcome_summary(exhibits: Iterable[JudgedExhibit]) -> str:
    return summarize_outcomes([(v.basis, v.outcome) for e in exhibits for v in e.verdicts])
