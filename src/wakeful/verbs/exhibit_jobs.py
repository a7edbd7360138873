"""The runs and heirs of an exhibit as work of a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wakeful.display import Shown, usual
from wakeful.exhibits.plan import Plan, heirs_table
from wakeful.runs.run import is_done
from wakeful.training.cluster import Call, Ended, Row, cluster_of, deal, told
from wakeful.verbs.exhibit_runs import make_heirs


@dataclass(frozen=True)
class Heirs:
    """The heirs and baselines of one reference."""

    label: str
    source: str
    table: Mapping[str, Any]
    """The inheritance's options."""
    place: Path

    @property
    def done(self) -> bool:
        """Whether all of them are trained."""
        return is_done(self.place)

    @property
    def call(self) -> Call:
        """Their inheritance, or what is left of it."""
        return inherit_all, self.source, dict(self.table), str(self.place)


def inherit_all(source: str, table: Mapping[str, Any], place: str) -> Ended:
    """Carry an inheritance out, or go on with it."""
    return told(lambda: make_heirs(source, table, Path(place), usual))


def dealt_out(
    plan: Plan, runs: Path, place: Path, cluster: str, shown: Shown
) -> Mapping[Path, str]:
    """Train what is missing on a cluster: every row and seed, then the heirs of those.

    Return what was wrong with runs that diverged, by their folders.
    """
    references = {group: plan.reference_of(group) for group in {job.group for job in plan.jobs}}
    jobs = {
        f"{job.group} {job.row}, seed {seed}".strip(): (job, seed)
        for seed in plan.seeds
        for job in plan.jobs
    }
    rows = {
        runs / job.folder / f"seed-{seed}": (label, job.seeded(seed))
        for label, (job, seed) in jobs.items()
        if references[job.group] is None
    }
    others = {label for label, (job, _) in jobs.items() if job.row != plan.exhibit.table.baseline}
    where = cluster_of(cluster)
    with shown(plan.exhibit.name) as show:
        faults = deal(
            [Row(label, config, path.absolute()) for path, (label, config) in rows.items()],
            where, place.absolute(), show, may_diverge=others,
        )  # fmt: skip
        overflowed = {path: faults[label] for path, (label, _) in rows.items() if label in faults}
        heirs = dict[Path, Heirs]()
        for label, (job, seed) in jobs.items():
            path = runs / job.folder / f"seed-{seed}"
            if job.group in plan.heirs and path not in overflowed:
                given = references[job.group]
                source = str(path.absolute()) if given is None else given.source
                own = (runs / plan.heirs_folder(job, seed) / f"seed-{seed}").absolute()
                heirs[own] = Heirs(
                    f"inheritance from {label}", source, heirs_table(plan, job, seed), own
                )
        deal([*heirs.values()], where, place.absolute(), show)
    return overflowed
