"""Exhibits of papers as data: the runs they compare, what they measure, claim and published.

A folder of `papers` is a paper. Its `paper.toml` has what its exhibits share; each other TOML file
is an exhibit, named "paper/file": `value-residual/fig6`. A file with `sizes` is one exhibit per
size, "paper/file-size", with the size's words for `{size}` in the title. In it a table whose keys
are sizes stands for the value of this size, and a table with its own `sizes` exists in those alone.

A row is a variant, by the name that it is trained under; a column is a figure of a run
(`figures`), in the paper's own numbers. Published values count as equal if they differ by at most
the share `same`. A direction ("lower", "higher", "same") replaces a value that is not known. Every
direction of the table is a claim if the exhibit has no claims of its own or sets `directions`. A
claim may presuppose a phenomenon that its rows must show (`Premise`); premises.toml has those of
figures that many exhibits have. A comparison fills the table (`filled`): one without rows gets the
variants that were trained. Columns with a better direction rank them (`ranks`).
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any, Literal, get_args

from wakeful.config.tables import TomlTable, from_table, merge_tables, parse_toml
from wakeful.errors import WakefulError, did_you_mean
from wakeful_papers.exhibits.outcomes import Claimed
from wakeful_papers.exhibits.table import Column, PublishedTable, direction_of

Scale = Literal["tiny", "small", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)
_PAPERS = resources.files("wakeful_papers") / "papers"
_SHARED = "paper.toml"
EQUAL_TRAINING = {"reference": "reference_on", "random": "random_total"}
"""Rows with as much training as an heir (its reference's steps plus its own), by the corresponding
rows of the paper: the reference trained further, and a random start trained for all these steps."""
EQUAL_TRAINING_LABELS = {
    "reference_on": "reference, trained on",
    "random_total": "random, for the steps of reference and heir",
}
_HEIR_ROWS = ("heir", "middle", "attention", "mlp")
"""Rows that the papers call better because of what they inherit."""
_SPEED_FIGURES = ("loss_over_training", "loss_after")
"""Figures of a row's convergence speed, comparable only between rows with an equal start."""


@dataclass(frozen=True, kw_only=True)
class Premise:
    """The phenomenon that a claim presupposes, such as a sink that a cure removes.

    A row shows it if the mean of `figure` over seeds is above `above`, or below `below`.
    """

    says: str
    """The phenomenon: "outliers", "a sink"."""
    figure: str
    row: str = ""
    """The row that should show it. Empty: the row that the claim's row is compared with."""
    only: bool = False
    """True if only that row may show it; otherwise the two rows that are compared may too."""
    above: float | None = None
    below: float | None = None

    def __post_init__(self) -> None:
        if self.only and not self.row:
            raise WakefulError(f"premise {self.says!r}: only = true needs a row")

    @property
    def threshold(self) -> str:
        """The threshold of its figure, in words."""
        return (
            f"above {self.above:g} asked" if self.below is None else f"below {self.below:g} asked"
        )

    def is_met(self, value: float) -> bool:
        """Return True if a value of the figure shows the phenomenon."""
        over = self.above is not None and value > self.above
        return over or (self.below is not None and value < self.below)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of the paper as a comparison of two figures of the same seed.

    It is `figure` of `row` in `group` minus that of `than` in `than_group`, or minus `than_value`.
    """

    says: str
    row: str
    direction: Claimed
    figure: str = "loss"
    group: str = ""
    """Empty: every group, each by itself."""
    than: str = ""
    """The row to compare with. Empty: the baseline, or the same row if `than_group` is set."""
    than_group: str = ""
    """Its group. Empty: the same."""
    than_value: float | None = None
    """A number to compare with instead of a row."""
    published: float | None = None
    """The difference that the paper prints, if it does."""
    published_scales: tuple[Scale, ...] = ()
    """Scales at which `published` is expected (a kurtosis grows with the width). Empty: all."""
    same: float = 0.05
    """Margin of the directions "same", "not higher" and "not lower", as a share of the figure that
    is compared with."""
    within: float | None = None
    """That margin in the figure's own unit, in place of a share."""
    scales: tuple[Scale, ...] = ()
    """Scales at which it is judged. Empty: all; a claim about tasks only if they are evaluated."""
    premise: Premise | None = None
    """None: the usual premise of its figure, or else the exhibit's."""
    alone: bool = False
    """True if the baseline may pass the number `than_value` too, because no cure is claimed."""
    read_off: bool = False
    """True if no sentence states its direction, which is read off two cells of a table."""
    by_construction: bool = False
    """True if the setting implies it: chosen until it held, or arithmetic."""
    own: bool = False
    """True if the claim is ours and the paper says nothing about it."""

    @property
    def is_about_tasks(self) -> bool:
        """True if its figure is an accuracy on tasks."""
        return "acc_" in self.figure

    def at_scale(self, scale: Scale) -> "Claim":
        """Return the claim, without a published difference that the scale cannot show."""
        expected = scale in (self.published_scales or SCALES)
        return self if expected else dataclasses.replace(self, published=None)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that are compared with each other: of one size, length or learning rate."""

    label: str
    at: float | None = None
    """The group's value on the axis of groups, such as its length."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its runs' configuration that differ from the exhibit's."""
    inherit: Mapping[str, Any] = field(default_factory=dict)
    """Fields of its `Heirs` that differ from the exhibit's."""
    scales: tuple[Scale, ...] = ()
    """Scales at which it is run. Empty: all."""


@dataclass(frozen=True, kw_only=True)
class Heirs:
    """An inheritance: heirs, which start from blocks of a reference, and baselines beside them."""

    keep: float = 0.5
    """Share of the reference's layers that the heir has, or the first heir if it grows."""
    baseline: tuple[str, ...] = ()
    """The inheritance's baselines, by their names in `wakeful_papers.heirs.BASELINES`."""
    steps: float = 1.0
    """Steps of the heir in each round, as a share of the reference's."""
    grow: float = 0.0
    """Share of the reference's layers that each round adds."""
    epochs: float = 0.0
    """Passes of an heir over the beginning of the text. 0: it is trained on the whole text."""


@dataclass(frozen=True)
class Existing:
    """A model that is not trained here."""

    source: str
    """A model that `wakeful.load` reads."""
    parameters: float
    """0: unknown until it is loaded."""


@dataclass(frozen=True, kw_only=True)
class _SharedFields:
    """The fields that an exhibit's file and the exhibit have in common."""

    draw: tuple[str, ...] = ()
    """The charts of its page, as calls of functions in `reports.charts.DRAWINGS`."""
    compare: str | dict[str, Any] = ""
    """The variants that are trained, in the paper's own numbers: a preset, or a table like one."""
    groups: Mapping[str, Group] = field(default_factory=dict)
    inherit: Heirs | None = None
    looks: int = 0
    """Validation windows on which layers are measured (0: none); of existing models, per seed."""
    probes: tuple[str, ...] = ()
    """Probes of these layers besides those of every run, by their names in `verbs.runs`."""
    lengths: tuple[float, ...] = ()
    """Other lengths of these windows, as shares of the training length."""
    schemes: tuple[str, ...] = ()
    """Schemes that existing models are quantized by; trained ones have settings of their own."""


@dataclass(frozen=True, kw_only=True)
class _Spec(_SharedFields):
    """An exhibit's file."""

    title: str
    claim: str
    note: str = ""
    settings: str = ""
    baseline: str = "vanilla"
    columns: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """The fields of each figure's `Column`."""
    rows: Mapping[str, Mapping[str, str | float]] = field(default_factory=dict)
    directions: bool = False
    scales: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    premise: Premise | None = None


@dataclass(frozen=True, kw_only=True)
class Exhibit(_SharedFields):
    """A figure or table of a paper."""

    name: str
    """PAPER/EXHIBIT."""
    paper: str
    """The paper's title."""
    claim: str
    """The paper's statement of what it shows, in a sentence."""
    settings: str
    """For a table of settings, where these are; empty if the exhibit has something to measure."""
    table: PublishedTable
    scales: Mapping[str, TomlTable]
    """Fields in place of the paper's, by the scale's name. Besides those of a configuration:
    `groups`, `variants`, fields of single groups and rows; `seeds`; `models`, existing models by
    row; `references`, models that heirs are made of, by group, `all` for every group; `looks`, in
    place of the exhibit's; `tune`, the rule for learning rates (`Tuning`); `elsewhere`, a second
    text on which layers are measured; `without`, rows that are left out; lm-eval's `tasks`."""
    claims: tuple[Claim, ...]

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks on which the paper evaluates its models, by lm-eval's names."""
        return tuple(self.scales["paper"].get("tasks", ()))

    def claims_at(self, scale: Scale, tasks: Sequence[str]) -> tuple[Claim, ...]:
        """Return the claims that are judged at a scale if models are evaluated on these tasks.

        A claim has its published difference only if the scale can be expected to show it.
        """
        return tuple(
            claim.at_scale(scale)
            for claim in self.claims
            if scale in (claim.scales or SCALES) and (bool(tasks) or not claim.is_about_tasks)
        )

    @property
    def title(self) -> str:
        """The exhibit's title in its paper."""
        return self.table.title

    @property
    def heading(self) -> str:
        """The title, after the paper's unless that is part of it or the exhibit is our own."""
        is_complete = self.paper in self.title or self.name.startswith("own/")
        return self.title if is_complete else f"{self.paper}: {self.title}"


@cache
def exhibit_names() -> tuple[str, ...]:
    """Return the names of all exhibits, sorted by paper and then by the exhibits' numbers."""
    return tuple(sorted(_exhibit_tables(), key=natural_key))


def read_exhibit(name: str) -> Exhibit:
    """Return the exhibit of a name.

    Raises:
        WakefulError: no exhibit has that name.
    """
    if name not in exhibit_names():
        raise WakefulError(
            f"there is no exhibit {name[:80]!r}{_suggest(name)}; wakeful reproduce lists them"
        )
    return _build_exhibit(name)


def expand_papers(names: Sequence[str]) -> tuple[str, ...]:
    """Return exhibits' names, each once, with a paper's runnable exhibits in place of its name."""
    expanded_names: dict[str, None] = {}
    for name in names:
        of_paper = [full for full in exhibit_names() if full.startswith(f"{name}/")]
        runnable = [full for full in of_paper if not read_exhibit(full).settings]
        expanded_names |= dict.fromkeys(runnable or [name])
    return tuple(expanded_names)


def _suggest(name: str) -> str:
    """Return a hint at the exhibits that an unknown name may mean.

    A name without a paper means the exhibit of that name in every paper; in a paper that has it
    only with suffixes, all of these.
    """
    stems = {full: full.partition("/")[2] for full in exhibit_names()}
    stem = name.casefold()
    if "/" not in name and not any(_has_stem(last, stem) for last in stems.values()):
        stem = next(iter(get_close_matches(stem, stems.values(), n=1)), "")
    matches = [full for full, last in stems.items() if _has_stem(last, stem)]
    if "/" in name or not matches:
        return did_you_mean(name, stems)
    exact = [full for full in matches if stems[full] == stem]
    papers = {full.partition("/")[0] for full in exact}
    matches = [full for full in matches if full in exact or full.partition("/")[0] not in papers]
    *firsts, last = map(repr, matches)
    return f" (did you mean {', '.join(firsts)}{' or ' if firsts else ''}{last}?)"


def _has_stem(name: str, stem: str) -> bool:
    """Return True if an exhibit's name is `stem`, alone or with a suffix: fig15a, fig6-medium."""
    return bool(stem) and re.fullmatch(rf"{re.escape(stem)}([a-z]|-.+)?", name) is not None


@cache
def _build_exhibit(name: str) -> Exhibit:
    shared = _read_toml(_PAPERS / name.partition("/")[0] / _SHARED)
    spec: _Spec = from_table(_Spec, _exhibit_tables()[name])
    columns = tuple(
        from_table(Column, {"figure": figure, **entry}) for figure, entry in spec.columns.items()
    )
    cells: dict[tuple[str, str], Any] = {
        (variant, key): cell
        for variant, row in spec.rows.items()
        for key, cell in row.items()
        if key != "label"
    }
    statement, note, settings = (
        " ".join(text.split()) for text in (spec.claim, spec.note, spec.settings)
    )
    table = PublishedTable(
        spec.title, note, spec.baseline, columns,
        {variant: str(row["label"]) for variant, row in spec.rows.items()}, cells,
    )  # fmt: skip
    scales = {
        scale: merge_tables(shared.get("scales", {}).get(scale, {}), spec.scales.get(scale, {}))
        for scale in SCALES
    }
    directions = _table_claims(table) if spec.directions or not spec.claims else ()
    claims = (*directions, *_add_equal_training_claims(spec, scales))
    return Exhibit(
        **{key.name: getattr(spec, key.name) for key in dataclasses.fields(_SharedFields)},
        name=name, paper=shared["title"], claim=statement, settings=settings, table=table,
        scales=scales,
        claims=tuple(
            claim if claim.premise else dataclasses.replace(claim, premise=usual_premise(
                claim, spec.baseline) or spec.premise)
            for claim in claims
        ),
    )  # fmt: skip


def _table_claims(table: PublishedTable) -> Iterator[Claim]:
    """Yield every direction of a table as a claim."""
    for row, label in table.labels.items():
        for column in table.columns:
            direction = direction_of(table, row, column)
            if direction is None:
                continue
            cell, base = (table.cells.get((name, column.figure)) for name in (row, table.baseline))
            published = None
            if isinstance(cell, int | float) and isinstance(base, int | float):
                published = cell - base
            yield Claim(
                says=f"{label}: {column.title}", row=row, direction=direction,
                figure=column.figure, published=published, same=column.same,
                read_off=published is not None,
            )  # fmt: skip


def _add_equal_training_claims(spec: _Spec, scales: Mapping[str, TomlTable]) -> Iterator[Claim]:
    """Yield an exhibit's own claims, and after one about heirs the same with equal training.

    The paper compares an heir with rows trained for the heir's own steps alone, without those of
    its reference. The added comparison is judged at scales that train the reference themselves.
    """
    for claim in spec.claims:
        yield claim
        than = claim.than or spec.baseline
        grown = spec.inherit is not None and spec.inherit.grow and than == "random"
        if (
            spec.inherit is None or grown or than not in EQUAL_TRAINING
            or claim.row not in _HEIR_ROWS or claim.direction == "same"
            or claim.figure.endswith("tokens") or claim.than_value is not None or claim.than_group
        ):  # fmt: skip
            continue
        trained_scales = tuple(s for s in claim.scales or SCALES if "references" not in scales[s])
        if claim.figure.startswith(_SPEED_FIGURES) or not trained_scales:
            continue
        steps = {"reference": "trained on for as many steps",
                 "random": "trained for the steps of both"}[than]  # fmt: skip
        yield dataclasses.replace(
            claim, says=f"{claim.says}, {steps}", than=EQUAL_TRAINING[than], published=None,
            scales=trained_scales, own=True,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _UsualPremise(Premise):
    """An entry of premises.toml: the premise of all claims about some figures."""

    of: str
    """A regular expression for these figures; `figure` may refer to its groups."""
    why: str
    """The source of its threshold."""


@cache
def usual_premises() -> tuple[_UsualPremise, ...]:
    """Return the premises of figures that many exhibits have."""
    table = _read_toml(resources.files("wakeful_papers.exhibits") / "premises.toml")
    return from_table(tuple[_UsualPremise, ...], table["premises"])


def usual_premise(claim: Claim, baseline: str) -> Premise | None:
    """Return the usual premise of a claim that compares rows; None if its figure has none.

    The row that is compared with should show the phenomenon or, if the claim is that the phenomenon
    grows again, the exhibit's baseline.
    """
    if claim.than_value is not None:
        return None
    for usual in usual_premises():
        if match := re.fullmatch(usual.of, claim.figure):
            grows = "lower" if usual.above is None else "higher"
            return Premise(
                says=usual.says, figure=match.expand(usual.figure), above=usual.above,
                below=usual.below, row=baseline if claim.direction == grows else "",
            )  # fmt: skip
    return None


@cache
def _exhibit_tables() -> dict[str, TomlTable]:
    """Return the TOML table of every exhibit by the exhibit's name."""
    tables: dict[str, TomlTable] = {}
    for paper in _PAPERS.iterdir():
        for file in paper.iterdir():
            if file.name == _SHARED:
                continue
            table, name = _read_toml(file), f"{paper.name}/{file.name.removesuffix('.toml')}"
            sizes: dict[str, str] = table.pop("sizes", {"": ""})
            for size, size_label in sizes.items():
                own = _select_size(table, size, sizes)
                own["title"] = own["title"].replace("{size}", size_label)
                tables[f"{name}-{size}" if size else name] = own
    return tables


def _select_size(value: Any, size: str, sizes: Mapping[str, str]) -> Any:
    """Return a value of a file as it is in one of its sizes; None if this size lacks it."""
    if isinstance(value, list):
        return [own for each in value if (own := _select_size(each, size, sizes)) is not None]
    if not isinstance(value, dict) or not value:
        return value
    if value.keys() <= sizes.keys():
        return value.get(size)
    if size not in value.get("sizes", sizes):
        return None
    own = {key: _select_size(part, size, sizes) for key, part in value.items() if key != "sizes"}
    return {key: part for key, part in own.items() if part is not None} or None


def _read_toml(file: Traversable) -> TomlTable:
    return parse_toml(file.read_bytes(), file.name)


def natural_key(name: str) -> list[str | int]:
    """Return a sort key that has fig2 before fig10, and figures before tables."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if part.isdecimal() else part for part in parts]
