"""Write docs/verdicts.md, every claim of finished exhibits: python tools/verdicts.py FOLDER...

What the page has of exhibits whose folders are not named stays.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import groupby
from pathlib import Path

from wakeful.comparison.outcomes import Outcome
from wakeful.estimates import with_error
from wakeful.runs.run import Run, read_record
from wakeful_papers.exhibits.exhibit import SCALES, natural
from wakeful_papers.exhibits.judge import Judged, Verdict
from wakeful_papers.pages.reproduction import OUTCOMES, Found, in_words

PAGE = Path(__file__).resolve().parent.parent / "docs" / "verdicts.md"
HEADING = re.compile(r"\*\*(?P<exhibit>.*)\*\* — (?P<scale>\w+) scale.*")
HEAD = """\
# Verdicts on every claim

What `wakeful reproduce EXHIBIT` found about each claim, paper by paper; [findings](findings.md) say
what was surprising. A verdict holds for its scale and text only. The tiny scale trains models of
0.1 to 1.3 million parameters for a few hundred steps, which shows what a method does early rather
than where it ends. Three of the arena's claims at 100 steps (MUDD, attention residuals,
hyper-connections) do not hold after 1,000.

Differences are paired over seeds, ± one standard error. A direction is confirmed or reversed
where the 95% interval (Student's t) leaves out zero; "same" is confirmed where the interval lies
within the equivalence margin (a difference so small counts as none). After a published size,
"inside" says that it lies in our interval, "outside" that it does not. A figure that rests on fewer
seeds than others of its exhibit says how many. Exhibits in which three seeds left a direction at
2.2 errors or more have five. Where all seeds agree exactly, as shares of a few layers may, the
interval has no width and any difference counts. Of this many claims one in twenty would stand out
by chance. At the tiny scale the sizes of a paper are one model, so exhibits that differ only in
size repeat each other, and runs that two exhibits share are trained once.
"""


@dataclass(frozen=True)
class Section:
    """An exhibit at a scale, as the page has it."""

    paper: str
    exhibit: str
    scale: str
    lines: tuple[str, ...]
    """Its heading, a table and an empty line."""

    @property
    def outcomes(self) -> list[str]:
        """What became of each claim: the table's last column."""
        return [line.rpartition(" | ")[2].removesuffix(" |") for line in self.lines[4:-1]]

    @property
    def claims(self) -> list[str]:
        """What each claim says: the table's first column."""
        return [line.partition(" | ")[0] for line in self.lines[4:-1]]


def main(folders: Iterable[Path], day: str) -> None:
    """Write the page: these exhibits' folders, and what it has of others or of other scales."""
    kept = {(each.exhibit, each.scale): each for each in read(PAGE.read_text("utf-8"))}
    for folder in folders:
        if Run.open(folder).header.status == "done":
            judged = read_record(Judged, folder / "summary.json")
            kept[judged.exhibit, judged.scale] = section(judged)
    PAGE.write_text("\n".join(lines(kept.values(), day)), encoding="utf-8")


def lines(sections: Iterable[Section], day: str) -> Iterator[str]:
    """Yield the page's lines."""
    scales = list[str](SCALES)
    every = sorted(
        sections, key=lambda one: (one.paper, natural(one.exhibit), scales.index(one.scale))
    )
    yield HEAD
    claims = {(one.paper, words) for one in every if one.scale == "tiny" for words in one.claims}
    yield (
        f"{day}. {_told(every)} {len(claims)} of the tiny scale's differ in paper or wording: the "
        "others repeat one at another of the paper's sizes.\n"
    )
    for paper, group in groupby(every, key=lambda one: one.paper):
        of_paper = list(group)
        yield f"## {paper}\n\n{_told(of_paper)}\n"
        for one in of_paper:
            yield from one.lines


def read(page: str) -> Iterator[Section]:
    """Yield the sections of a page that was written here."""
    paper, block = "", list[str]()
    for line in [*page.splitlines(), ""]:
        if line.startswith("## "):
            paper = line.removeprefix("## ")
        elif line.startswith("**") or block:
            block.append(line)
        if not line and len(block) > 2:  # the heading is followed by one too
            found = HEADING.fullmatch(block[0])
            assert found, block[0]
            yield Section(paper, found["exhibit"], found["scale"], tuple(block))
            block = []


def _told(sections: Sequence[Section]) -> str:
    """Return what came out at each scale: verdicts of two do not add up."""
    sentences: list[str] = []
    for scale in SCALES:
        at_it = [one for one in sections if one.scale == scale]
        every = [outcome for one in at_it for outcome in one.outcomes]
        if at_it:
            counts: dict[Outcome, int] = {outcome: every.count(outcome) for outcome in OUTCOMES}
            sentences.append(
                f"{scale.capitalize()} scale, {len(at_it)} exhibit{'s' * (len(at_it) > 1)}, "
                f"{len(every)} claims: {in_words(counts)}."
            )
    return " ".join(sentences)


def section(judged: Judged) -> Section:
    """Return what the page says of an exhibit."""
    rows: list[str] = []
    seeds = max((verdict.seeds for verdict in judged.verdicts), default=0)
    for verdict in judged.verdicts:
        where = f" ({verdict.group})" if verdict.group else ""
        here = _here(verdict, seeds)
        cells = (f"{verdict.says}{where}", _published(verdict), here, verdict.outcome)
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    heading = f"**{judged.exhibit}** — {judged.headline}"
    head = (heading, "", "| claim | published | here | verdict |", "|---|---|---|---|")
    return Section(judged.paper, judged.exhibit, judged.scale, (*head, *rows, ""))


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
