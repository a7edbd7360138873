"""A report as one value, which a page, a terminal and a notebook draw."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from wakeful.finding import Finding, Level
from wakeful.reports.charts import Drawing, Titled
from wakeful.reports.terms import explain

Style = Literal["", "note", "caveat", "quote", "heading", "explained", "code"]


@dataclass(frozen=True)
class NextStep:
    """A suggested next step and its command."""

    text: str
    command: str


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    style: Style = ""


@dataclass(frozen=True)
class BulletList:
    """Lines of a list."""

    lines: Sequence[str]


@dataclass(frozen=True)
class Facts:
    """Terms with their descriptions."""

    entries: Sequence[tuple[str, str]]
    brief: bool = True
    """True where a terminal shows them with the parts around them."""


@dataclass(frozen=True)
class Cell:
    """A figure; in small what goes with it, beside it or in lines under it."""

    text: str
    small: str = ""
    under: Sequence[str] = ()
    level: Level | Literal[""] = ""
    link: str = ""
    style: str = ""
    """"bold", or an outcome's name."""


Row = Sequence[Cell | str]


@dataclass(frozen=True)
class Table:
    """Rows, each of which begins with its heading."""

    columns: Sequence[str]
    rows: Sequence[Row]
    label: str = ""
    kind: str = ""
    """Style on the page: "paper", "figures", "claims", "overview", "words" (sentences); only of
    "" a terminal shows what stands under figures."""
    marks: Sequence[tuple[str, str]] = ()
    """A color and a shape for each row."""
    terminal: Sequence[str] | None = None
    """The columns that a terminal has room for; None is all of them."""
    colored: bool = False
    """True where columns after the first have the colors of charts."""

    @property
    def for_terminal(self) -> Iterator[tuple[str, list[Cell]]]:
        """Name and cells of each column that a terminal shows: the first, and those named in
        `terminal` (all if it is None).
        """
        for number, name in enumerate(self.columns):
            if self.terminal is None or number == 0 or name in self.terminal:
                yield name, [row[number] for row in self.cells]

    @cached_property
    def cells(self) -> list[list[Cell]]:
        """The rows, every entry a cell."""
        return [
            [entry if isinstance(entry, Cell) else Cell(entry) for entry in row]
            for row in self.rows
        ]


@dataclass(frozen=True)
class Chart:
    """A drawing, made when it is drawn; one of nothing is left out."""

    label: str
    """Title on its own: in a paper, to a screen reader."""
    draw: Callable[[], Drawing | None]
    heading: str = ""
    explained: str = ""

    @cached_property
    def drawing(self) -> Drawing | None:
        """The drawing; None where there is nothing to draw."""
        return self.draw()


@dataclass(frozen=True)
class SideBySide:
    """Parts beside each other, as many as fit; `wide` ones take half a page."""

    parts: Sequence["Part"]
    wide: bool = False


@dataclass(frozen=True)
class Group:
    """Parts one below the other."""

    parts: Sequence["Part"]


@dataclass(frozen=True)
class Legend:
    """Names with their colors, dashes or shapes, which switch them in all charts of the page."""

    names: Sequence[str]
    kind: Literal["dashes", "shapes"] = "dashes"


@dataclass(frozen=True)
class Findings:
    """The same findings on each of some models, by name, and a word for each level."""

    by_model: Mapping[str, Sequence[Finding]]
    level_names: Mapping[Level, str]

    @property
    def table(self) -> Table:
        """Findings as rows, models as columns: every model has the same findings in one order."""
        rows: list[list[Cell]] = []
        for findings in zip(*self.by_model.values(), strict=True):  # one finding on each model
            heading = Cell(findings[0].title, under=[findings[0].band])
            verdicts = [
                Cell(self.level_names[finding.level], finding.text, level=finding.level,
                     style="bold")
                for finding in findings
            ]  # fmt: skip
            rows.append([heading, *verdicts])
        columns = ["finding", *self.by_model]
        return Table(columns, rows, "Verdict on each model", "words", colored=True)


@dataclass(frozen=True)
class Fold:
    """Parts that a page shows when they are asked for."""

    title: str
    parts: Sequence["Part"]
    open: bool = False


Part = (
    Text | BulletList | Facts | Table | Chart | SideBySide | Group | Legend | Findings
    | Fold
)  # fmt: skip


@dataclass(frozen=True)
class Section:
    """Parts under a title; `brief` ones are in short what was found, on a terminal too."""

    title: str
    parts: Sequence[Part]
    brief: bool = False


@dataclass(frozen=True)
class Report:
    """Report of a tool."""

    title: str
    headlines: Sequence[str]
    steps: Sequence[NextStep]
    sections: Sequence[Section]

    @property
    def brief(self) -> Iterator[Part]:
        """The parts that say in short what was found."""
        return (part for section in self.sections if section.brief for part in section.parts)

    @cached_property
    def sentences(self) -> list[str]:
        """The headlines, the sentences of brief parts, and all findings, each sentence once."""
        parts = (part for section in self.sections for part in section.parts
                 if section.brief or isinstance(part, Findings))  # fmt: skip
        return list(dict.fromkeys([*self.headlines, *_brief_sentences(parts)]))

    def charts(self) -> Titled:
        """Return every chart with a title of its own."""
        return [*self._drawings()]

    @property
    def picture(self) -> Drawing | None:
        """The first chart, which a notebook shows; None where there is none."""
        return next((drawing for _, drawing in self._drawings()), None)

    def _drawings(self) -> Iterator[tuple[str, Drawing]]:
        """Yield (title, drawing) of each chart that has something to draw."""
        for chart in _iterate_charts(self.sections):
            if chart.drawing is not None:
                yield chart.label, chart.drawing


def _brief_sentences(parts: Iterable[Part]) -> Iterator[str]:
    """Yield the sentences of the given parts: of texts without a style (no notes or caveats), of
    brief facts ("term: description") and of findings.
    """
    for part in parts:
        if isinstance(part, Text) and not part.style:
            yield part.text
        elif isinstance(part, Facts) and part.brief:
            yield from (f"{term}: {description}" for term, description in part.entries)
        elif isinstance(part, Findings):
            for name, findings in part.by_model.items():
                prefix = f"{name}: " if name else ""  # a single model has no name
                yield from (f"{prefix}{finding.title}: {finding.text}" for finding in findings)


def _iterate_charts(parts: Iterable[Part | Section]) -> Iterator[Chart]:
    """Yield the charts among parts and inside them, in the page's order."""
    for part in parts:
        if isinstance(part, Chart):
            yield part
        elif isinstance(part, SideBySide | Group | Fold | Section):
            yield from _iterate_charts(part.parts)


def listed(names: Iterable[object]) -> str:
    """Return "a, b and c"; "" without names."""
    *before, last = [*map(str, names)] or [""]
    return f"{', '.join(before)} and {last}" if before else last


def rough(value: float) -> str:
    """Return a number with three significant digits: "58,900", "7.31"."""
    if value <= 0:  # it has no logarithm
        return f"{value:g}".replace("-", "−")
    decimals = 2 - math.floor(math.log10(value))  # negative for numbers that end in zeros
    return f"{round(value, decimals):,.{max(0, decimals)}f}"


def terms(entries: Iterable[tuple[str, str]]) -> Facts:
    """Return the glossary's explanations of figures under the names of the pairs (name, figure).

    A name without an explanation is left out, as is one whose explanation an earlier name has.
    """
    name_by_explanation: dict[str, str] = {}
    for name, figure in entries:
        explanation = explain(figure)
        if explanation:
            name_by_explanation.setdefault(explanation, name)
    facts = [(name, explanation) for explanation, name in name_by_explanation.items()]
    return Facts(facts, brief=False)


_CALLED = {"kl": "KL", "first_key_share": "sink", "bos_mass_other": "attention on BOS"}
"""Names of figures in words, where they are not their own with spaces."""


def glossary(*figures: str) -> Section:
    """Return the section that explains figures, given by their names in the glossary."""
    named = ((_CALLED.get(figure, figure.replace("_", " ")), figure) for figure in figures)
    return Section("Glossary", [terms(named)])


def method_section(entries: Mapping[str, str] | Sequence[tuple[str, str]], *more: Part) -> Section:
    """Return the section "Method": topics with what a reader needs to judge and repeat the figures,
    and further parts.
    """
    pairs = entries.items() if isinstance(entries, Mapping) else entries
    return Section("Method", [Facts([*pairs]), *more])
