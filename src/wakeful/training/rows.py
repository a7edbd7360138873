"""Several variants, several seeds, one folder."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wakeful.config.rows import config_differences
from wakeful.config.schema import Config
from wakeful.config.tables import to_table
from wakeful.errors import Diverged, Interrupted, WakefulError
from wakeful.runs.records import DataFacts, data_facts
from wakeful.runs.run import Run, is_done, refuse_link
from wakeful.terminal.display import Display, DisplayFactory
from wakeful.training.cluster import cluster_of, deal, run_work
from wakeful.training.loop import train_run
from wakeful.training.setup import check_run

_SAME_DATA = "train both on the same data"
IN_COMMON = {
    "corpus_sha256": _SAME_DATA,
    "tokenizer": _SAME_DATA,
    "validation_sha256": _SAME_DATA,
    "train.length": "give both the same",
    "model.relaxed_prefix": "losses leave out the targets inside a prefix, so the means would be "
    "over other tokens; compare rows of one prefix, or train each with wakeful train",
}
"""Facts that variants must share for their losses to be paired, and the remedies."""


def train_variants(
    variants: Mapping[str, Config],
    path: str | Path,
    *,
    seeds: Sequence[int],
    display: DisplayFactory,
    layouts: Sequence[str] = (),
    resume: bool = False,
    cluster: str = "",
) -> Run:
    """Train every variant with every seed below `path`; the first variant is the baseline.

    `layouts` are the names of those that add to the report.

    The seed sets the initial weights, equal wherever names and shapes agree, and the data order,
    so that differences between variants are paired. `resume` goes on with a comparison that was
    interrupted: finished runs stay, unfinished ones continue, variants and seeds that it lacks join
    it, and those that are not named here stay as they are. A run that diverges is left unfinished
    and the others go on, unless it is of the baseline. What can be wrong with any variant's
    model, optimizer, text or teacher is found before anything is written. `cluster` deals the runs
    out (`training.cluster`); empty trains one after another here.
    """
    dealt = cluster_of(cluster) if cluster else None
    if len(set(seeds)) != len(seeds):
        raise WakefulError(f"seeds names one twice: {list(seeds)!r}")
    comparison = Run(path)
    names = list(variants)
    facts = {"name": comparison.path.name, "baseline": names[0], "variants": names,
             "seeds": list(seeds), "layouts": list(layouts)}  # fmt: skip
    beside = None
    if resume:
        beside = _joined(comparison, facts)
    else:
        comparison.refuse_existing("compare")
    variants = _checked(variants, display, beside)
    if not resume:
        comparison.make("compare", facts)
    rows = [
        _Row(name, config, seed, comparison.path)
        for seed in seeds
        for name, config in variants.items()
    ]
    for name, config in variants.items():
        refuse_link(comparison.path / name)
        for seed in facts["seeds"]:
            _Row(name, config, seed, comparison.path).check_begun()
    said = {key: facts[key] for key in ("variants", "seeds", "layouts")}
    comparison.update(status="running", **said)
    baseline = comparison.header.baseline
    others = {row.label for row in rows if row.variant != baseline}
    try:
        if dealt is not None:
            work = [run_work(row.label, row.config, row.place.absolute()) for row in rows]
            with display("compare") as show:
                deal(work, dealt, comparison.path.absolute(), show, may_diverge=others)
        else:
            for row in rows:
                with display(row.variant if len(seeds) == 1 else row.label) as show:
                    try:
                        row.train(show)
                    except Diverged as error:
                        if row.label not in others:
                            raise
                        show.note(f"{row.label}: {error}; the others go on without it")
    except BaseException:
        comparison.set_status("stopped")
        raise
    comparison.set_status("done" if _finished(comparison) else "stopped")
    return comparison


def _joined(comparison: Run, facts: dict[str, Any]) -> tuple[str, Mapping[str, object]] | None:
    """Let what a comparison has already go before what is asked for, in `facts`.

    Return one of its runs, by name, and what all must have in common with it, if there is any.
    """
    begun = Run.open(comparison.path)
    begun.check_kind("compare", "is not a comparison")
    header = begun.header
    if not set(header.variants) & set(facts["variants"]):
        raise WakefulError(
            f"{comparison.path} compares {', '.join(header.variants)}, and none of "
            f"{', '.join(facts['variants'])}: choose another folder, or name one that is there"
        )
    for key in ("variants", "seeds", "layouts"):
        there = list(getattr(header, key))
        facts[key] = there + [each for each in facts[key] if each not in there]
    for name in header.variants:
        for place in sorted((comparison.path / name).glob("seed-*")):
            if (place / "data.json").is_file() and (place / "config.toml").is_file():
                run = Run.open(place)
                return name, _paired(run.config, run.read(DataFacts, "data.json"))
    return None


def _finished(comparison: Run) -> bool:
    """Tell whether every run of a comparison is done."""
    header = Run.open(comparison.path).header
    places = [
        comparison.path / name / f"seed-{seed}" for name in header.variants for seed in header.seeds
    ]
    return all(is_done(place) for place in places)


class _Row:
    """A variant with a seed: a run of a comparison."""

    def __init__(self, variant: str, config: Config, seed: int, folder: Path) -> None:
        self.variant, self.label = variant, f"{variant}, seed {seed}"
        self.place = folder / variant / f"seed-{seed}"
        self.config = dataclasses.replace(
            config, train=dataclasses.replace(config.train, seed=seed)
        )

    @property
    def begun(self) -> bool:
        """True where its folder exists."""
        return (self.place / "run.json").is_file()

    def train(self, show: Display) -> None:
        """Train it if it is not finished, or go on with it."""
        if is_done(self.place):
            return
        try:
            train_run(self.config, self.place, resume=self.begun, show=show)
        except Interrupted as stopped:
            raise Interrupted(
                f"{self.label}: {stopped.what}", "continue with the same command and --resume"
            ) from None

    def check_begun(self) -> None:
        """Raise `WakefulError` where it was begun otherwise than it is now.

        Reports take all seeds of a variant for one.
        """
        refuse_link(self.place)
        odd = config_differences(Run.open(self.place).config, self.config) if self.begun else {}
        if odd:
            told = ", ".join(f"{key} was {a!r} and is {b!r}" for key, (a, b) in odd.items())
            raise WakefulError(
                f"{self.place} was begun with another configuration than its variant has now: "
                f"{told}; restore it, give the variant another name, or choose another folder"
            )


def _checked(
    variants: Mapping[str, Config],
    display: DisplayFactory,
    first: tuple[str, Mapping[str, object]] | None,
) -> dict[str, Config]:
    """Return the variants resolved; raise what any of their runs would raise before it begins.

    They must be of one text, one tokenizer and one length, those of the `first` run where there is
    one, or their losses could not be paired.
    """
    found: dict[str, Config] = {}
    for name, config in variants.items():
        with display(name) as show:
            try:
                found[name], data = check_run(config, show.stage)
            except WakefulError as error:
                raise WakefulError(f"{name}: {error}") from error
        told = _paired(config, data_facts(data))
        first = first or (name, told)
        for key, cure in IN_COMMON.items():
            if told[key] != first[1][key]:
                raise WakefulError(
                    f"{name} and {first[0]} cannot be compared: their {key} differs; {cure}"
                )
    return found


def _paired(config: Config, data: DataFacts) -> dict[str, object]:
    """Return a run's values of what is `IN_COMMON`."""
    prefix = max(1, config.model.relaxed_prefix)  # one token sees itself either way
    own = {"train.length": config.train.length, "model.relaxed_prefix": prefix}
    return {**to_table(data), **own}
