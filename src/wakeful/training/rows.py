"""Training of several variants with several seeds in one folder."""

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
from wakeful.training.cluster import cluster_of, distribute_work, run_work
from wakeful.training.loop import train_run
from wakeful.training.setup import check_run

_SAME_DATA = "train both on the same data"
IN_COMMON = {
    "corpus_sha256": _SAME_DATA,
    "tokenizer": _SAME_DATA,
    "validation_sha256": _SAME_DATA,
    "train.length": "give both the same",
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

    A seed sets the initial weights, equal where names and shapes agree, and the data order, so that
    differences between variants are paired. `resume` continues an interrupted comparison: finished
    runs are kept, unfinished ones continue, new variants and seeds are added. A run that diverges
    stays unfinished while the others continue, unless it is the baseline's. All variants are
    checked before anything is written. `layouts` names the report's layouts. `cluster` distributes
    the runs (`training.cluster`); without it they are trained here one by one.
    """
    workers = cluster_of(cluster) if cluster else None
    if len(set(seeds)) != len(seeds):
        raise WakefulError(f"seeds names one twice: {list(seeds)!r}")
    comparison = Run(path)
    names = list(variants)
    facts = {"name": comparison.path.name, "baseline": names[0], "variants": names,
             "seeds": list(seeds), "layouts": list(layouts)}  # fmt: skip
    reference = None
    if resume:
        reference = _merge_existing(comparison, facts)
    else:
        comparison.refuse_existing("compare")
    variants = _resolve_variants(variants, display, reference)
    if not resume:
        comparison.make("compare", facts)
    runs = [
        _PlannedRun(name, config, seed, comparison.path)
        for seed in seeds
        for name, config in variants.items()
    ]
    for name, config in variants.items():
        refuse_link(comparison.path / name)
        for seed in facts["seeds"]:  # those of earlier calls too
            _PlannedRun(name, config, seed, comparison.path).check_config()
    new_fields = {key: facts[key] for key in ("variants", "seeds", "layouts")}
    comparison.update(status="running", **new_fields)
    baseline = comparison.header.baseline
    may_diverge = {run.label for run in runs if run.variant != baseline}
    try:
        if workers is not None:
            work = [run_work(run.label, run.config, run.folder.absolute()) for run in runs]
            with display("compare") as show:
                distribute_work(
                    work, workers, comparison.path.absolute(), show, may_diverge=may_diverge
                )
        else:
            for run in runs:
                with display(run.variant if len(seeds) == 1 else run.label) as show:
                    try:
                        run.train(show)
                    except Diverged as error:
                        if run.label not in may_diverge:
                            raise
                        show.note(f"{run.label}: {error}; the others go on without it")
    except BaseException:
        comparison.set_status("stopped")
        raise
    comparison.set_status("done" if _finished(comparison) else "stopped")
    return comparison


def _merge_existing(
    comparison: Run, facts: dict[str, Any]
) -> tuple[str, Mapping[str, object]] | None:
    """Put the variants, seeds and layouts of an existing comparison before those in `facts`, which
    is changed.

    Return (variant, values) of the first of its runs that has begun: all runs must have the same
    values of the fields in `IN_COMMON`. None if no run has begun.

    Raises:
        WakefulError: the folder holds no comparison, or one that shares no variant with `facts`.
    """
    stored = Run.open(comparison.path)
    stored.check_kind("compare", "is not a comparison")
    header = stored.header
    if not set(header.variants) & set(facts["variants"]):
        raise WakefulError(
            f"{comparison.path} compares {', '.join(header.variants)}, and none of "
            f"{', '.join(facts['variants'])}: choose another folder, or name one that is there"
        )
    for key in ("variants", "seeds", "layouts"):
        existing = list(getattr(header, key))
        facts[key] = existing + [value for value in facts[key] if value not in existing]
    for name in header.variants:
        for folder in sorted((comparison.path / name).glob("seed-*")):
            if (folder / "data.json").is_file() and (folder / "config.toml").is_file():
                run = Run.open(folder)
                return name, _values_in_common(run.config, run.read(DataFacts, "data.json"))
    return None


def _finished(comparison: Run) -> bool:
    """Return whether every run of a comparison is done."""
    header = Run.open(comparison.path).header
    folders = [
        comparison.path / name / f"seed-{seed}" for name in header.variants for seed in header.seeds
    ]
    return all(is_done(folder) for folder in folders)


class _PlannedRun:
    """A run of a comparison, of one variant with one seed, which may have begun or ended."""

    def __init__(self, variant: str, config: Config, seed: int, folder: Path) -> None:
        """Set the run's label, its folder below the comparison's `folder`, and its configuration:
        `config` with this seed.
        """
        self.variant, self.label = variant, f"{variant}, seed {seed}"
        self.folder = folder / variant / f"seed-{seed}"
        self.config = dataclasses.replace(
            config, train=dataclasses.replace(config.train, seed=seed)
        )

    @property
    def exists(self) -> bool:
        """True if the run has begun."""
        return (self.folder / "run.json").is_file()

    def train(self, show: Display) -> None:
        """Train or continue the run, unless it is finished; an `Interrupted` gets its label."""
        if is_done(self.folder):
            return
        try:
            train_run(self.config, self.folder, resume=self.exists, show=show)
        except Interrupted as stopped:
            raise Interrupted(
                f"{self.label}: {stopped.what}", "continue with the same command and --resume"
            ) from None

    def check_config(self) -> None:
        """Raise `WakefulError` if the run has begun with another configuration, or its folder is a
        symbolic link.

        Reports treat all seeds of a variant as one configuration.
        """
        refuse_link(self.folder)
        if not self.exists:
            return
        changed_fields = config_differences(Run.open(self.folder).config, self.config)
        if changed_fields:
            differences = ", ".join(
                f"{key} was {old!r} and is {new!r}" for key, (old, new) in changed_fields.items()
            )
            raise WakefulError(
                f"{self.folder} was begun with another configuration than its variant has now: "
                f"{differences}; restore it, give the variant another name, or choose another "
                "folder"
            )


def _resolve_variants(
    variants: Mapping[str, Config],
    display: DisplayFactory,
    reference: tuple[str, Mapping[str, object]] | None,
) -> dict[str, Config]:
    """Return the variants' resolved configurations, by name, after checking that each can be
    trained.

    So that their losses can be paired, all must have the same values of the fields in `IN_COMMON`
    as `reference`: (variant, values) of an existing run, or None for the first of `variants`.

    Raises:
        WakefulError: a value differs, or a run could not start.
    """
    resolved: dict[str, Config] = {}
    for name, config in variants.items():
        with display(name) as show:
            try:
                resolved[name], data = check_run(config, show.stage)
            except WakefulError as error:
                raise WakefulError(f"{name}: {error}") from error
        values = _values_in_common(config, data_facts(data))
        reference = reference or (name, values)
        reference_name, reference_values = reference
        for key, remedy in IN_COMMON.items():
            if values[key] != reference_values[key]:
                raise WakefulError(
                    f"{name} and {reference_name} cannot be compared: their {key} differs; {remedy}"
                )
    return resolved


def _values_in_common(config: Config, data: DataFacts) -> dict[str, object]:
    """Return a run's values of the fields in `IN_COMMON`, among others of its data."""
    return {**to_table(data), "train.length": config.train.length}
