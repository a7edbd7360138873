"""Papers' exhibits as data: what is compared, what is measured, claimed and published.

A folder of `papers` is a paper, with `paper.toml` for what its exhibits share, and a TOML file an
exhibit, called "paper/file": `value-residual/fig6`. One of several sizes (`sizes`, each with its
words for `{size}` in the title) is an exhibit a size, "paper/file-size": a table with sizes for
keys stands for the value that each has, and one that names its `sizes` is of those alone. Figures
are the papers' own. A row is a
variant, by the name that it is trained under; a column is a figure of a run (`figures`), whose
paper values count as equal where they differ by no more than the share `same`. A direction
("lower", "higher", "same") stands where no figure is at hand. An exhibit without claims of its own
claims every direction of its table, and so does one that says `directions`. A claim is about a
phenomenon that a baseline must show (`Premise`); premises.toml has those of figures that many
exhibits have. A table without rows has those that were trained; its columns that say which way is
better are ranked, group by group (`ranks`).
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
ALIKE = {"reference": "reference_on", "random": "random_total"}
"""The rows that heirs are judged beside, by those that the paper has: their training is an heir's,
its reference's steps and its own. The one is the reference trained on, the other random for all."""
ALIKE_LABELS = {
    "reference_on": "reference, trained on",
    "random_total": "random, for the steps of reference and heir",
}
_INHERITED = ("heir", "middle", "attention", "mlp")
"""Rows that are said to be better for what they inherit."""
_SPEED = ("loss_over_training", "loss_after")
"""Figures of how fast a row converges, which only an equal start makes comparable."""


@dataclass(frozen=True, kw_only=True)
class Premise:
    """What must be there for a claim to say anything: a sink, say, where one is to vanish.

    It is there where the mean of `figure` over seeds is past `above`, or below `below`.
    """

    says: str
    """The phenomenon: "outliers", "a sink"."""
    figure: str
    row: str = ""
    """Where it is asked for. Empty: in the row that the claim's is compared with."""
    only: bool = False
    """Whether it is asked for in that row alone, not in the claim's own rows too."""
    above: float | None = None
    below: float | None = None

    def __post_init__(self) -> None:
        if self.only and not self.row:
            raise WakefulError(f"premise {self.says!r}: only = true needs a row")

    @property
    def bar(self) -> str:
        """What its figure must be past, in words."""
        return (
            f"above {self.above:g} asked" if self.below is None else f"below {self.below:g} asked"
        )

    def shown(self, value: float) -> bool:
        """Whether a value of the figure is that of the phenomenon."""
        over = self.above is not None and value > self.above
        return over or (self.below is not None and value < self.below)


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of the paper's, as a comparison of two figures of the same seed.

    It is of `figure` of `row` in `group` minus that of `than` in `than_group`, or minus `least`.
    """

    says: str
    row: str
    direction: Claimed
    figure: str = "loss"
    group: str = ""
    """Empty: every group, each by itself."""
    than: str = ""
    """The other row. Empty: the baseline, or the same row where another group is named."""
    than_group: str = ""
    """The other group. Empty: the same."""
    than_value: float | None = None
    """A number to compare with instead of a row."""
    published: float | None = None
    """The paper's difference, where it prints one."""
    published_scales: tuple[Scale, ...] = ()
    """Where that difference can be expected. Empty: everywhere; a kurtosis depends on the width."""
    same: float = 0.05
    """For the directions "same", "not higher" and "not lower": the share of the other figure that
    is no difference."""
    within: float | None = None
    """The difference that is none, in the figure's own unit, in place of that share."""
    scales: tuple[Scale, ...] = ()
    """Where it is judged. Empty: everywhere, and of tasks where they are asked."""
    premise: Premise | None = None
    """Empty: the exhibit's, or the usual one of its figure."""
    alone: bool = False
    """Of a number: whether the baseline may pass too, because no cure is claimed."""
    read_off: bool = False
    """Whether its direction is read off two cells of a table, and no sentence says it."""
    by_construction: bool = False
    """Whether the setting makes it so: chosen until it held, or arithmetic."""
    own: bool = False
    """Whether it is a claim of ours, about which the paper says nothing."""

    @property
    def of_tasks(self) -> bool:
        """Whether its figure is an accuracy on tasks."""
        return "acc_" in self.figure

    def at(self, scale: Scale) -> "Claim":
        """Return the claim at a scale: without a published difference not to be expected there."""
        expected = scale in (self.published_scales or SCALES)
        return self if expected else dataclasses.replace(self, published=None)


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows that are compared among themselves: of one size, length or learning rate."""

    label: str
    at: float | None = None
    """Where the group stands on the axis of groups."""
    fields: Mapping[str, Any] = field(default_factory=dict)
    """What its runs have in place of the others' configuration."""
    inherit: Mapping[str, Any] = field(default_factory=dict)
    """What its heirs have in place of the others', by the fields of `Heirs`."""
    scales: tuple[Scale, ...] = ()
    """Where it is run. Empty: everywhere."""


@dataclass(frozen=True, kw_only=True)
class Heirs:
    """An inheritance: arms that start from blocks of a trained reference."""

    keep: float = 0.5
    """Share of the reference's layers that the arms have."""
    baseline: tuple[str, ...] = ()
    """The arms beside the heir."""
    steps: float = 1.0
    """Steps of an arm, as a share of the reference's."""
    grow: float = 0.0
    """Share of the reference's layers that each round adds."""
    epochs: float = 0.0
    """Passes over the tokens that the arms are trained on, the first of the text. 0: over as many
    as there are."""


@dataclass(frozen=True)
class Existing:
    """A model that is not trained here."""

    source: str
    """What `wakeful.load` reads."""
    parameters: float
    """0: not known before it is loaded."""


@dataclass(frozen=True, kw_only=True)
class _Contents:
    """What an exhibit's file says, and so the exhibit."""

    draw: tuple[str, ...] = ()
    """The drawings of its page, by `reports.charts.DRAWINGS`."""
    compare: str | dict[str, Any] = ""
    """A preset with variants, or a table like one: what is trained, in the paper's own numbers."""
    groups: Mapping[str, Group] = field(default_factory=dict)
    inherit: Heirs | None = None
    looks: int = 0
    """Validation windows on which the trained models' layers are looked at; 0: none."""
    probes: tuple[str, ...] = ()
    """What looks at them besides what a run logs anyway, by `verbs.reproduce.PROBES`."""
    lengths: tuple[float, ...] = ()
    """Other lengths at which they are looked at, as shares of the training length."""
    schemes: tuple[str, ...] = ()
    """Schemes that existing models are quantized by; what is trained has its own settings."""


@dataclass(frozen=True, kw_only=True)
class _Spec(_Contents):
    """An exhibit's file."""

    title: str
    claim: str
    note: str = ""
    settings: str = ""
    baseline: str = "vanilla"
    columns: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Of each figure the fields of its `Column`."""
    rows: Mapping[str, Mapping[str, str | float]] = field(default_factory=dict)
    directions: bool = False
    scales: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    claims: tuple[Claim, ...] = ()
    premise: Premise | None = None


@dataclass(frozen=True, kw_only=True)
class Exhibit(_Contents):
    """A figure or table of a paper."""

    name: str
    """PAPER/EXHIBIT."""
    paper: str
    """The paper's title."""
    claim: str
    """What the paper says it shows, in a sentence."""
    settings: str
    """Where the settings that it lists are to be found; empty where it has something to measure."""
    table: PublishedTable
    scales: Mapping[str, TomlTable]
    """Fields in place of the paper's, by the scale's name. Beside those of a configuration:
    `models`, existing models by row; `references`, those that heirs are made of, by group, `all` of
    every group; `looks`, in place of the exhibit's; `tune`, how learning rates are chosen
    (`Tuning`); `elsewhere`, a text besides its own on which a trained model's layers are looked at;
    `without`, rows that are not trained; and `tasks`, lm-eval's, that the models are asked, whose
    data comes from the hub."""
    claims: tuple[Claim, ...]

    @property
    def tasks(self) -> tuple[str, ...]:
        """The tasks that the paper asked its models, in lm-eval's names."""
        return tuple(self.scales["paper"].get("tasks", ()))

    def claims_at(self, scale: Scale, tasks: Sequence[str]) -> tuple[Claim, ...]:
        """Return the claims that are judged at a scale where models are asked these tasks.

        Each has the published difference only where it can be expected.
        """
        return tuple(
            claim.at(scale)
            for claim in self.claims
            if scale in (claim.scales or SCALES) and (bool(tasks) or not claim.of_tasks)
        )

    @property
    def title(self) -> str:
        """What the exhibit is called in its paper."""
        return self.table.title

    @property
    def heading(self) -> str:
        """The title with the paper's, where it does not hold it already."""
        named = self.paper in self.title or self.name.startswith("own/")
        return self.title if named else f"{self.paper}: {self.title}"


@cache
def exhibit_names() -> tuple[str, ...]:
    """Return every exhibit's name, paper by paper in the order of the exhibits' numbers."""
    return tuple(sorted(_tables(), key=natural))


def exhibit(name: str) -> Exhibit:
    """Return an exhibit by its name.

    Raises:
        WakefulError: there is none of that name.
    """
    if name not in exhibit_names():
        raise WakefulError(
            f"there is no exhibit {name[:80]!r}{_meant(name)}; wakeful reproduce lists them"
        )
    return _read(name)


def expanded(names: Sequence[str]) -> tuple[str, ...]:
    """Return exhibits' names with those of all its exhibits in place of a paper's, `headline`."""
    found: dict[str, None] = {}
    for name in names:
        of_paper = [each for each in exhibit_names() if each.startswith(f"{name}/")]
        runnable = [each for each in of_paper if not exhibit(each).settings]
        found |= dict.fromkeys(runnable or [name])
    return tuple(found)


def _meant(name: str) -> str:
    """Return a hint at what an unknown name may mean.

    Without a paper it is that exhibit of each; of one that has it with suffixes alone all these.
    """
    own = {known: known.partition("/")[2] for known in exhibit_names()}
    wanted = name.casefold()
    if "/" not in name and not any(_begins(wanted, last) for last in own.values()):
        wanted = next(iter(get_close_matches(wanted, own.values(), n=1)), "")
    found = [known for known, last in own.items() if _begins(wanted, last)]
    if "/" in name or not found:
        return did_you_mean(name, own)
    whole = [known for known in found if own[known] == wanted]
    papers = {known.partition("/")[0] for known in whole}
    found = [known for known in found if known in whole or known.partition("/")[0] not in papers]
    *others, last = map(repr, found)
    return f" (did you mean {', '.join(others)}{' or ' if others else ''}{last}?)"


def _begins(wanted: str, name: str) -> bool:
    """Tell whether an exhibit's name is this one, alone or with a suffix: fig15a, fig6-medium."""
    return bool(wanted) and re.fullmatch(rf"{re.escape(wanted)}([a-z]|-.+)?", name) is not None


@cache
def _read(name: str) -> Exhibit:
    shared = _toml(_PAPERS / name.partition("/")[0] / _SHARED)
    spec: _Spec = from_table(_Spec, _tables()[name])
    columns = tuple(
        from_table(Column, {"figure": figure, **entry}) for figure, entry in spec.columns.items()
    )
    cells: dict[tuple[str, str], Any] = {
        (variant, key): cell
        for variant, row in spec.rows.items()
        for key, cell in row.items()
        if key != "label"
    }
    claim, note, settings = (
        " ".join(words.split()) for words in (spec.claim, spec.note, spec.settings)
    )
    table = PublishedTable(
        spec.title, note, spec.baseline, columns,
        {variant: str(row["label"]) for variant, row in spec.rows.items()}, cells,
    )  # fmt: skip
    scales = {
        scale: merge_tables(shared.get("scales", {}).get(scale, {}), spec.scales.get(scale, {}))
        for scale in SCALES
    }
    directions = _claims(table) if spec.directions or not spec.claims else ()
    claims = (*directions, *_trained_alike(spec, scales))
    return Exhibit(
        **{each.name: getattr(spec, each.name) for each in dataclasses.fields(_Contents)},
        name=name, paper=shared["title"], claim=claim, settings=settings, table=table,
        scales=scales,
        claims=tuple(
            each if each.premise else dataclasses.replace(each, premise=premise_of(
                each, spec.baseline) or spec.premise)
            for each in claims
        ),
    )  # fmt: skip


def _claims(table: PublishedTable) -> Iterator[Claim]:
    """Yield each direction of a table as a claim."""
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


def _trained_alike(spec: _Spec, scales: Mapping[str, TomlTable]) -> Iterator[Claim]:
    """Yield an exhibit's own claims, and those about an heir with as much training on both sides.

    The paper sets an heir beside a reference and a random start that have had as many steps as it
    alone. Below the paper's scale both comparisons are judged.
    """
    for claim in spec.claims:
        yield claim
        than = claim.than or spec.baseline
        grown = spec.inherit is not None and spec.inherit.grow and than == "random"
        if (
            spec.inherit is None or grown or than not in ALIKE or claim.row not in _INHERITED
            or claim.direction == "same" or claim.figure.endswith("tokens")
            or claim.than_value is not None or claim.than_group
        ):  # fmt: skip
            continue
        judged = claim.scales or SCALES
        here = tuple(scale for scale in judged if "references" not in scales[scale])
        if claim.figure.startswith(_SPEED) or not here:
            continue
        steps = {"reference": "trained on for as many steps",
                 "random": "trained for the steps of both"}[than]  # fmt: skip
        yield dataclasses.replace(
            claim, says=f"{claim.says}, {steps}", than=ALIKE[than], published=None, scales=here,
            own=True,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Usual(Premise):
    """The premise of all claims of some figures: one in premises.toml."""

    of: str
    """The figures, a regular expression, whose groups its `figure` has."""
    why: str
    """Where the number comes from."""


@cache
def usual_premises() -> tuple[_Usual, ...]:
    """Return the premises of figures that many exhibits have."""
    table = _toml(resources.files("wakeful_papers.exhibits") / "premises.toml")
    return from_table(tuple[_Usual, ...], table["premises"])


def premise_of(claim: Claim, baseline: str) -> Premise | None:
    """Return the usual premise of a claim that compares rows; None where its figure has none.

    What gets less must be in the row that the claim's is compared with, what comes back in the
    exhibit's baseline.
    """
    if claim.than_value is not None:
        return None
    for each in usual_premises():
        if found := re.fullmatch(each.of, claim.figure):
            more = "lower" if each.above is None else "higher"
            return Premise(
                says=each.says, figure=found.expand(each.figure), above=each.above,
                below=each.below, row=baseline if claim.direction == more else "",
            )  # fmt: skip
    return None


@cache
def _tables() -> dict[str, TomlTable]:
    """Return each exhibit's table by its name."""
    found: dict[str, TomlTable] = {}
    for paper in _PAPERS.iterdir():
        for file in paper.iterdir():
            if file.name == _SHARED:
                continue
            table, name = _toml(file), f"{paper.name}/{file.name.removesuffix('.toml')}"
            sizes: dict[str, str] = table.pop("sizes", {"": ""})
            for size, words in sizes.items():
                own = _of_size(table, size, sizes)
                own["title"] = own["title"].replace("{size}", words)
                found[f"{name}-{size}" if size else name] = own
    return found


def _of_size(value: Any, size: str, sizes: Mapping[str, str]) -> Any:
    """Return what a value is in one of a file's sizes; None where it is not of this size."""
    if isinstance(value, list):
        return [own for each in value if (own := _of_size(each, size, sizes)) is not None]
    if not isinstance(value, dict) or not value:
        return value
    if value.keys() <= sizes.keys():
        return value.get(size)
    if size not in value.get("sizes", sizes):
        return None
    found = {key: _of_size(each, size, sizes) for key, each in value.items() if key != "sizes"}
    return {key: own for key, own in found.items() if own is not None} or None


def _toml(file: Traversable) -> TomlTable:
    return parse_toml(file.read_bytes(), file.name)


def natural(name: str) -> list[str | int]:
    """Order fig2 before fig10, and figures before tables."""
    parts = re.split(r"(\d+)", name)
    return [int(part) if part.isdecimal() else part for part in parts]
