"""The demonstration's page: a patient that is cured, four twins, a pretrained model's disease."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from wakeful.comparison.reading import Comparison, TrainedRun
from wakeful.comparison.tables import machines, smoothing_window
from wakeful.evaluation.diagnosis import Diagnosis
from wakeful.evaluation.findings import Level, findings, sink_level
from wakeful.pages.charts import Titled, colors, unchecked
from wakeful.pages.comparison.charts import difference_chart, relative_loss_chart
from wakeful.pages.comparison.page import caveat, comparison_figures, verdicts
from wakeful.pages.diagnosis import first_token_heads
from wakeful.pages.film import film_of
from wakeful.pages.page import Step, write_page

_HEALTH: Mapping[Level, str] = {
    "good": "stays well", "mixed": "sickens a little", "bad": "falls ill"
}  # fmt: skip
_SINKS: Mapping[Level, str] = {
    "good": "has no attention sinks", "mixed": "has some attention sinks",
    "bad": "has strong attention sinks",
}  # fmt: skip
_FOLLOWED = {
    "bos_mass_other": "attention on BOS where there is nothing to copy",
    "excess_loss": "validation loss over the task's own (nats)",
}


Links = Mapping[str, Sequence[tuple[str, str]]]
"""Words and addresses, for each part's name."""


@dataclass(frozen=True)
class Story:
    """What the demonstration's three parts found."""

    patient: Comparison
    twins: Comparison
    pretrained: Diagnosis | None
    """None where it was not diagnosed."""
    absent: str = ""
    """Why not."""

    @property
    def sentences(self) -> tuple[str, str, str]:
        """One sentence a part, which says what was measured."""
        return _patient(self.patient), _joined(verdicts(self.twins)), self._pretrained()

    def _pretrained(self) -> str:
        if self.pretrained is None:
            return self.absent
        sinks = findings(self.pretrained)[0]
        text = sinks.text[0].lower() + sinks.text[1:]
        return f"{self.pretrained.name} {_SINKS[sinks.level]}: {text}"


def _headline(story: Story) -> str:
    first, *rest = (story.patient.of(name)[0] for name in story.patient.variants)
    told = [f"{run.variant} {_HEALTH[sink_level(_ends(run)[1])]}" for run in (first, *rest)]
    if story.pretrained is not None:
        told.append(f"{story.pretrained.name} {_SINKS[findings(story.pretrained)[0].level]}")
    return "; ".join(told) + "."


def _patient(found: Comparison) -> str:
    first, *rest = (found.of(name)[0] for name in found.variants)
    before, after = _ends(first)
    told = [
        f"In {first.config.train.steps:,} steps {first.variant} {_HEALTH[sink_level(after)]}: "
        f"where there is nothing to copy, its head gives BOS {after:.1%} of its attention "
        f"({before:.1%} before training)"
    ]
    for run in rest:
        mass = _ends(run)[1]
        told.append(f"{run.variant} {_HEALTH[sink_level(mass)]}, with {mass:.1%}")
    return _joined([*told, *verdicts(found)])


def _ends(run: TrainedRun) -> tuple[float, float]:
    """Return a run's attention on BOS before the first step and after the last."""
    mass = run.followed.filter(pl.col("figure") == "bos_mass_other")["value"]
    return mass[0], mass[-1]


def _joined(sentences: Sequence[str]) -> str:
    return "; ".join(each.removesuffix(".") for each in sentences) + "."


@dataclass(frozen=True)
class Curve:
    """A variant's line in a panel."""

    name: str
    color: str
    points: tuple[tuple[float, float], ...]
    """Places from the left and from the top, each between 0 and 1."""
    last: float


@dataclass(frozen=True)
class Panel:
    """A figure over training steps, drawn without a script."""

    title: str
    curves: tuple[Curve, ...]
    steps: int
    top: float
    """The value at the upper edge; 0 is at the lower."""


def _panels(found: Comparison) -> list[Panel]:
    panels: list[Panel] = []
    for figure, title in _FOLLOWED.items():
        runs = [found.of(name)[0] for name in found.variants]
        tables = [run.followed.filter(pl.col("figure") == figure) for run in runs]
        steps = max(run.config.train.steps for run in runs)
        top = _round(max(max(table["value"], default=0.0) for table in tables))
        curves = tuple(
            Curve(
                run.variant, color,
                tuple((step / steps, 1 - value / top)
                      for step, value in table.select("step", "value").iter_rows()),
                table["value"][-1],
            )
            for run, table, color in zip(runs, tables, colors(runs), strict=True)
        )  # fmt: skip
        panels.append(Panel(title, curves, steps, top))
    return panels


def _round(value: float) -> float:
    """Return the next larger number whose quarters are short."""
    unit = 10.0 ** math.floor(math.log10(value)) if value > 0 else 1.0
    return next(times * unit for times in (1, 2, 4, 8, 10) if times * unit >= value)


def demonstration_figures(story: Story) -> Titled:
    """Return the charts of the three parts, each with a title of its own."""
    parts = (("Patient", story.patient), ("Twins", story.twins))
    charts = [
        (f"{name}: {title[0].lower()}{title[1:]}", chart)
        for name, found in parts
        for title, chart in comparison_figures(found)
    ]
    if story.pretrained is not None:
        name = f"First-token share of each layer and head of {story.pretrained.name}"
        charts.append((name, first_token_heads(story.pretrained)))
    return charts


@unchecked
def write_demonstration(story: Story, path: str | Path, *, links: Links) -> Path:
    """Write the page, with `links` to the full pages of each part."""
    firsts = [story.patient.of(name)[0] for name in story.patient.variants]
    return write_page(
        path,
        "demonstration",
        title="wakeful demo: a patient, four twins and a pretrained model",
        headlines=[_headline(story)],
        steps=[Step("diagnose a model of yours, by name or folder", "wakeful diagnose MODEL")],
        story=story,
        films=[film_of(run, color) for run, color in zip(firsts, colors(firsts), strict=True)],
        panels=_panels(story.patient),
        relative=relative_loss_chart(story.twins, smoothing_window(story.twins)),
        difference=difference_chart(story.twins),
        caveat=caveat(story.twins),
        heads=story.pretrained and first_token_heads(story.pretrained),
        findings=findings(story.pretrained) if story.pretrained else [],
        links=links,
        machines=machines(story.twins),
    )
