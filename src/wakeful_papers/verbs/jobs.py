"""The runs and heirs of exhibits, and their judgment, as work of a cluster."""

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wakeful.display import Shown, usual
from wakeful.runs.run import is_done
from wakeful.training.cluster import Call, Ended, RunRow, Work, cluster_of, deal, ended_of
from wakeful_papers.exhibits.plan import Plan, heirs_table
from wakeful_papers.verbs.runs import make_heirs

_LOOK = 0.1
"""What looking at a model takes, as a share of its training, very roughly."""
Judge = Callable[[str, Path], object]
"""What looks at an exhibit's runs and judges its claims, given its name and folder."""


@dataclass(frozen=True)
class HeirsJob:
    """The heirs and baselines of one reference."""

    label: str
    source: str
    table: Mapping[str, Any]
    """The inheritance's options."""
    place: Path
    after: Collection[str] = ()
    operations: float = math.inf

    @property
    def done(self) -> bool:
        """Whether all of them are trained."""
        return is_done(self.place)

    @property
    def call(self) -> Call:
        """Their inheritance, or what is left of it."""
        return inherit_all, self.source, dict(self.table), str(self.place)


@dataclass(frozen=True)
class Judgment:
    """An exhibit whose runs are finished: looked at, judged and written."""

    label: str
    """The exhibit's name."""
    place: Path
    after: Collection[str]
    operations: float
    judge: Judge

    @property
    def done(self) -> bool:
        """Never: a page is written anew."""
        return False

    @property
    def call(self) -> Call:
        """Its judgment."""
        return judge_one, self.judge, self.label, str(self.place)


def inherit_all(source: str, table: Mapping[str, Any], place: str) -> Ended:
    """Carry an inheritance out, or go on with it; a reference that diverged has no heirs."""
    if (Path(source) / "run.json").is_file() and not is_done(Path(source)):
        return Ended()
    return ended_of(lambda: make_heirs(source, table, Path(place), usual))


def judge_one(judge: Judge, name: str, place: str) -> Ended:
    """Judge an exhibit."""
    return ended_of(lambda: judge(name, Path(place)))


def dealt_out(
    plans: Mapping[Path, Plan],
    runs: Path,
    place: Path,
    cluster: str,
    shown: Shown,
    judge: Judge | None = None,
) -> dict[Path, str]:
    """Train what is missing on a cluster: every row and seed, and the heirs of those.

    With `judge` a worker judges each exhibit when its runs have ended, and the others go on
    whatever is wrong with one. Return what was wrong, by the folder of a run that diverged or of an
    exhibit. Jobs write what they say below `place`.
    """
    work = dict[Path, Work]()
    labels = dict[Path, str]()
    baselines: set[str] = set()
    for folder, plan in plans.items():
        own = _work_of(plan, runs, f"{plan.exhibit.name}: " if judge else "", labels, baselines)
        work |= {path: each for path, each in own.items() if path not in work}
        if judge:
            costs = [(each.operations, each.stage) for each in plan.pieces.values()]
            operations = sum(cost * (1 if stage == "reading" else _LOOK) for cost, stage in costs)
            after = {work[path].label for path in own}
            work[folder] = Judgment(plan.exhibit.name, folder.absolute(), after, operations, judge)
    may_diverge = {each.label for each in work.values() if isinstance(each, RunRow)} - baselines
    names = [plan.exhibit.name for plan in plans.values()]
    with shown(names[0] if len(names) == 1 else f"{len(names)} exhibits") as show:
        faults = deal(
            [*work.values()], cluster_of(cluster), place.absolute(), show,
            may_diverge=may_diverge, may_fail=judge is not None,
        )  # fmt: skip
    return {path: faults[each.label] for path, each in work.items() if each.label in faults}


def _work_of(
    plan: Plan, runs: Path, prefix: str, labels: dict[Path, str], baselines: set[str]
) -> dict[Path, Work]:
    """Return an exhibit's runs and inheritances by their folders.

    `labels` has those of runs, which several exhibits may share; baselines' join `baselines`.
    """
    found: dict[Path, Work] = {}
    for seed in plan.seeds:
        for job in plan.jobs:
            path = runs / job.folder / f"seed-{seed}"
            name = f"{f'{job.group} {job.row}'.strip()}, seed {seed}"
            given = plan.reference_of(job.group)
            if given is None:
                label = labels.setdefault(path, f"{prefix}{name}")
                found[path] = RunRow(label, job.seeded(seed), path.absolute())
                if job.row == plan.exhibit.table.baseline:
                    baselines.add(label)
            if plan.heirs_of(job):
                own = runs / plan.heirs_folder(job, seed) / f"seed-{seed}"
                label = labels.setdefault(own, f"{prefix}inheritance from {name}")
                source, after = (
                    (given.source, ()) if given else (str(path.absolute()), (labels[path],))
                )
                table = heirs_table(plan, job, seed)
                found[own] = HeirsJob(label, source, table, own.absolute(), after)
    return found
