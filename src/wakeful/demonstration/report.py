"""Report of the demonstration: a patient, its cure, four twins, a pretrained model."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import polars as pl

from wakeful.diagnosis import FIRST_SHARE, LEVELS, ModelDiagnosis, findings, head_map, sink_level
from wakeful.finding import Level
from wakeful.reports.value import (
    Chart,
    Findings,
    NextStep,
    Part,
    Report,
    Section,
    SideBySide,
    Text,
    glossary,
)
from wakeful.reports.value import Links as To
from wakeful.training import (
    METRIC_TITLES,
    ComparedRuns,
    TrainedRun,
    caveat,
    comparison_verdicts,
    difference_chart,
    machines,
    metric_charts,
    relative_loss_chart,
)

_HEALTH: Mapping[Level, str] = {
    "good": "stays well", "mixed": "sickens a little", "bad": "falls ill"
}  # fmt: skip
_SINKS: Mapping[Level, str] = {
    "good": "has no attention sinks", "mixed": "has some attention sinks",
    "bad": "has strong attention sinks",
}  # fmt: skip
_PATIENT_METRICS = {METRIC_TITLES["bos_mass_other"], METRIC_TITLES["excess_loss"]}
"""Titles of the patient's charts that the page shows."""
PartLinks = Mapping[str, Sequence[tuple[str, str]]]
"""Texts and addresses of links, by the part's name."""


@dataclass(frozen=True)
class Story:
    """Results of the demonstration's three parts."""

    patient: ComparedRuns
    twins: ComparedRuns
    pretrained: ModelDiagnosis | None
    """None where it was not diagnosed."""
    absence: str = ""
    """Why the pretrained model was not diagnosed."""

    @property
    def sentences(self) -> tuple[str, str, str]:
        """One sentence for each part, which says what was measured."""
        return (
            _describe_patient(self.patient),
            _join_sentences(comparison_verdicts(self.twins)),
            self._describe_pretrained(),
        )

    def _describe_pretrained(self) -> str:
        """Return the first finding about the pretrained model, or why there is none."""
        if self.pretrained is None:
            return self.absence
        sinks = findings(self.pretrained)[0]
        text = sinks.text[0].lower() + sinks.text[1:]
        return f"{self.pretrained.name} {_SINKS[sinks.level]}: {text}"


def _format_headline(story: Story) -> str:
    """Return one sentence: the health of the patient and of its cured variant by their final
    attention on BOS, and the sinks of the pretrained model.
    """
    states: list[str] = []
    for name in story.patient.variants:
        run = story.patient.of(name)[0]
        _, final_mass = _bos_mass_at_ends(run)
        states.append(f"{run.variant} {_HEALTH[sink_level(final_mass)]}")
    if story.pretrained is not None:
        states.append(f"{story.pretrained.name} {_SINKS[findings(story.pretrained)[0].level]}")
    return "; ".join(states) + "."


def _describe_patient(runs: ComparedRuns) -> str:
    """Return a sentence about the attention on BOS of the patient (the first run) before and after
    training and of its cured variants after training, and about their losses.
    """
    first, *rest = (runs.of(name)[0] for name in runs.variants)
    before, after = _bos_mass_at_ends(first)
    lines = [
        f"In {first.config.train.steps:,} steps {first.variant} {_HEALTH[sink_level(after)]}: "
        f"where there is nothing to copy, its head gives BOS {after:.1%} of its attention "
        f"({before:.1%} before training)"
    ]
    for run in rest:
        _, final_mass = _bos_mass_at_ends(run)
        lines.append(f"{run.variant} {_HEALTH[sink_level(final_mass)]}, with {final_mass:.1%}")
    return _join_sentences([*lines, *comparison_verdicts(runs)])


def _bos_mass_at_ends(run: TrainedRun) -> tuple[float, float]:
    """Return the mean attention on BOS, where a head has nothing to copy, before a run's first step
    and after its last one.
    """
    mass = run.followed.filter(pl.col("figure") == "bos_mass_other")["value"]
    return mass[0], mass[-1]


def _format_speed_caveat(twins: ComparedRuns) -> str:
    """Return the caveat that so short a comparison shows early speed alone."""
    baseline_runs = twins.of(twins.variants[0])
    seeds = f"{len(baseline_runs)} seed{'s' * (len(baseline_runs) > 1)}"
    return (
        f"{baseline_runs[0].config.train.steps:,} steps of {seeds} at one rate show early speed "
        "alone: after 6,000 steps at tuned rates ResFormer's difference to vanilla was gone."
    )


def _join_sentences(sentences: Sequence[str]) -> str:
    return "; ".join(sentence.removesuffix(".") for sentence in sentences) + "."


def build_demonstration_report(story: Story, links: PartLinks) -> Report:
    """Return the report of the three parts, with `links` to the full pages of each."""
    sentences, pretrained = story.sentences, story.pretrained
    patient_runs = [story.patient.of(name)[0] for name in story.patient.variants]
    pretrained_parts: list[Part] = []
    if pretrained is not None:
        pretrained_parts = [
            Text("The share of queries whose largest weight is the first key, for every layer and "
                 "head.", "note"),
            Chart(f"First-token share of each layer and head of {pretrained.name}",
                  partial(head_map, pretrained, FIRST_SHARE)),
            Findings({"": findings(pretrained)}, LEVELS),
            To(links.get("pretrained", ())),
        ]  # fmt: skip
    twin_charts = [
        Chart(f"Twins: {label}", partial(draw, story.twins), label) for label, draw in (
            ("training loss minus the baseline's", relative_loss_chart),
            ("final validation loss minus the baseline's", difference_chart),
        )
    ]  # fmt: skip
    command = f"wakeful diagnose {shlex.quote(str(patient_runs[0].path))}"
    step = NextStep("diagnose the patient, or a model of yours in its place", command)
    return Report("wakeful demo: a patient, four twins and a pretrained model",
                  [_format_headline(story)], [step], [
        Section("1. A patient falls ill, and a cure", [
            Text(sentences[0]),
            Text("The one head of a model of one layer has to copy a character at triggers. "
                 "Elsewhere it has nothing to do, and weight on BOS there is a sink.", "note"),
            SideBySide([chart for chart in metric_charts(story.patient)
                  if chart.label in _PATIENT_METRICS], wide=True),
            To(links.get("patient", ())),
        ], brief=True),
        Section("2. Four twins", [
            Text(sentences[1]), Text(_format_speed_caveat(story.twins), "caveat"),
            Text(caveat(story.twins), "note"), *twin_charts,
            To(links.get("twins", ())),
        ], brief=True),
        Section("3. A pretrained model", [Text(sentences[2]), *pretrained_parts], brief=True),
        glossary("ill", "well", "bos_mass_other", "row_0"),
        Section("", [Text("; ".join(machines(story.twins)), "note")]),
    ])  # fmt: skip
