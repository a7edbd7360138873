"""Write the page of every claim of finished exhibits: python papers/tools/verdicts.py FOLDER...

What the page has of exhibits whose folders are not named stays.
"""

import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import groupby
from pathlib import Path

from wakeful.estimates import format_estimate
from wakeful.runs.run import Run, read_record
from wakeful_papers.exhibits.exhibit import SCALES, natural_key, read_exhibit
from wakeful_papers.exhibits.judge import JudgedExhibit, Verdict
from wakeful_papers.reports.reproduction import BASES, format_difference, summarize_outcomes

PAGE = Path(__file__).resolve().parent.parent / "docs" / "verdicts.md"
HEADING = re.compile(r"\*\*(?P<exhibit>.*)\*\* — (?P<scale>\w+) scale.*")
COLUMNS = "| claim | compared with | statistic and premise | the paper | here | verdict |"
FIRST = read_exhibit("headline/values").paper
"""The paper whose exhibits come first."""
HEAD = """\
# Verdicts

The papers' headline claims come first: those of their abstracts, contributions and conclusions, and
of the main comparisons of their sections.
Their runs are long enough to be past the early phase of training. Not all of them have what the
cures are to remove: then a claim is not applicable. Learning rates are tuned by the same rule,
except for outliers ([how](reproduce.md#the-headline-claims)). The claims of all other figures and
tables are in the [appendix](#appendix-every-exhibit); their runs are shorter and show less.

Differences are paired over seeds, ± one standard error. A verdict holds for its scale and text.

- **confirmed** or **reversed**: the whole 95% interval (Student's t) is on the paper's side of zero
  or on the other. A difference within a margin counts as none: "same" is confirmed if the interval
  lies within the margin, "not higher" if it lies below it, "not lower" if it lies above minus the
  margin; they are reversed if the interval lies wholly beyond it. Rows judged before 2026-11-30 do
  not name their margin.
- **not resolved**: the interval includes zero or the margin, or there is one seed.
- **not run**: the claim's rows have not been trained yet.
- **not applicable**: what the claim is about (a sink, outliers, lazy layers, a loss by
  quantization) is in none of the rows, or a method that it compares with gains nothing here, or the
  baseline passes the claim's number too. A reversed claim becomes not applicable only if the whole
  intervals of all rows show nothing. So a claim that something exists is never reversed: a small
  model without it refutes nothing.

Each line names what the claim's row is compared with, the statistic and the premise; each heading
has the length of the sequences. After a published size, "inside" means that it lies in our
interval, "outside" that it does not; of two seeds neither is said. If a figure rests on fewer seeds
than others of its exhibit, it says how many.

Two kinds of claims are counted apart. Claims by construction hold because the setting was chosen
so, or by arithmetic. Other claims are not made by the paper itself: we ask a question of our own,
read a direction from a table's cells, or judge by the loss instead of accuracy, or on other models.
"""
APPENDIX = """\
## Appendix: every exhibit

The tiny scale trains models of 0.1 to 1.3 million parameters for a few hundred steps, the small
scale for a few thousand. **They can show** what a method does early in training, whether its
direction is clear despite the noise of seeds, and that an exhibit runs. **They cannot show** where
a method ends after 10,000 steps and more, the size of a gain at 82M parameters, accuracies on
tasks, or outliers and lazy layers, which do not grow in so short a training. All rows have the
learning rate of the scale. Three of the arena's claims that hold at 100 steps (MUDD, attention
residuals, hyper-connections) do not hold after 1,000.

Each heading has the number of seeds. If all seeds give exactly the same figure, as a share of a few
layers may, the interval has no width and any difference counts. Of this many claims, one in twenty
would stand out by chance. At the tiny scale all sizes of a paper are one model, so exhibits that
differ only in size repeat each other, and runs that two exhibits share are trained once.
"""
NO_HEADLINE = """\
*The headline claims have not been run yet: `wakeful reproduce headline --scale small`.*
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
    def outcomes(self) -> list[tuple[str, str]]:
        """On what each claim is judged and what became of it: of the first and last column."""
        rows = self.lines[4:-1]
        return [(_basis(line), line.rpartition(" | ")[2].removesuffix(" |")) for line in rows]

    @property
    def claims(self) -> list[str]:
        """What each claim says: the table's first column."""
        return [line.partition(" | ")[0] for line in self.lines[4:-1]]


def main(folders: Iterable[Path], day: str) -> None:
    """Write the page: these exhibits' folders, and what it has of others or of other scales."""
    kept = {(each.exhibit, each.scale): each for each in read(PAGE.read_text("utf-8"))}
    for folder in folders:
        if Run.open(folder).header.status == "done":
            judged = read_record(JudgedExhibit, folder / "summary.json")
            kept[judged.exhibit, judged.scale] = section(judged)
        else:
            print(f"{folder} is unfinished: left out")
    PAGE.write_text("\n".join(lines(kept.values(), day)), encoding="utf-8")


def lines(sections: Iterable[Section], day: str) -> Iterator[str]:
    """Yield the page's lines."""
    scales = list[str](SCALES)
    every = sorted(
        sections, key=lambda one: (one.paper, natural_key(one.exhibit), scales.index(one.scale))
    )
    headline = [one for one in every if one.paper == FIRST]
    others = [one for one in every if one.paper != FIRST]
    yield HEAD
    yield f"{day}. {_told(headline)}\n" if headline else NO_HEADLINE
    for one in headline:
        yield from one.lines
    yield APPENDIX
    claims = {(one.paper, words) for one in others if one.scale == "tiny" for words in one.claims}
    yield (
        f"{day}. {_told(others)} {len(claims)} of the tiny scale's differ in paper or wording: the "
        "others repeat one at another of the paper's sizes.\n"
    )
    for paper, group in groupby(others, key=lambda one: one.paper):
        of_paper = list(group)
        yield f"## {paper}\n\n{_told(of_paper)}\n"
        for one in of_paper:
            yield from one.lines


def read(page: str) -> Iterator[Section]:
    """Yield the sections of a page that was written here."""
    paper, block = FIRST, list[str]()
    for line in [*page.splitlines(), ""]:
        if line.startswith("## "):
            paper = line.removeprefix("## ")
        elif line.startswith("**") or block:
            block.append(line)
        if not line and len(block) > 2:  # the heading is followed by one too
            found = HEADING.fullmatch(block[0])
            assert found, block[0]
            assert block[2] == COLUMNS, block[0]  # of three verdicts: none is left
            yield Section(paper, found["exhibit"], found["scale"], tuple(block))
            block = []


def _told(sections: Sequence[Section]) -> str:
    """Return what came out at each scale: verdicts of two do not add up."""
    sentences: list[str] = []
    for scale in SCALES:
        at_it = [one for one in sections if one.scale == scale]
        if at_it:
            told = summarize_outcomes([outcome for one in at_it for outcome in one.outcomes])
            count = f"{len(at_it)} exhibit{'s' * (len(at_it) > 1)}"
            sentences.append(f"{scale.capitalize()} scale, {count}, {told}")
    return " ".join(sentences)


def _basis(line: str) -> str:
    claim = line.partition(" | ")[0]
    return next((each for each in BASES if each and claim.endswith(f" *({each})*")), "")


def section(judged: JudgedExhibit) -> Section:
    """Return what the page says of an exhibit."""
    rows: list[str] = []
    seeds = max((verdict.seeds for verdict in judged.verdicts), default=0)
    for verdict in judged.verdicts:
        where = f" ({verdict.group})" if verdict.group else ""
        here = _here(verdict, seeds)
        basis = f" *({verdict.basis})*" if verdict.basis else ""
        cells = (
            f"{verdict.says}{where}{basis}", verdict.beside, _statistic(verdict),
            _published(verdict), here, verdict.outcome,
        )  # fmt: skip
        rows.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    heading = f"**{judged.exhibit}** — {judged.headline}"
    head = (heading, "", COLUMNS, "|---|---|---|---|---|---|")
    return Section(judged.paper, judged.exhibit, judged.scale, (*head, *rows, ""))


def _statistic(verdict: Verdict) -> str:
    """Return what is measured, and what must be there for the claim to say anything."""
    return f"`{verdict.figure}`" + (f"; premise: {verdict.asked}" if verdict.asked else "")


def _published(verdict: Verdict) -> str:
    margin = "" if verdict.margin is None else f" (margin {verdict.margin:.3g})"
    if verdict.published is None:
        return f"{verdict.direction}{margin}"
    place = {True: ", inside", False: ", outside", None: ""}[verdict.size]
    return f"{verdict.direction}{margin}, {verdict.published:+.4g}".replace("-", "−") + place


def _here(verdict: Verdict, seeds: int) -> str:
    """Return the difference, and of a claim that is not applicable why, and what it says alone."""
    told = _difference(verdict, seeds)
    if verdict.outcome != "not applicable":
        return told
    alone = f"; the difference alone: {verdict.direct}" if verdict.direct else ""
    return f"{told}; {verdict.because}{alone}"


def _difference(verdict: Verdict, seeds: int) -> str:
    if verdict.difference is None:
        return "not measured"
    if verdict.error is None:
        return format_difference(verdict)[0]
    told = format_estimate(verdict.difference, verdict.error, "+")
    return told if verdict.seeds == seeds else f"{told}, {verdict.seeds} of {seeds} seeds"


if __name__ == "__main__":
    main(map(Path, sys.argv[1:]), date.today().isoformat())
