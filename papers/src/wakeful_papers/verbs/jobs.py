"""The runs and heirs of exhibits, and their judgment, as work of a cluster."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from wakeful.runs.run import is_done
from wakeful.terminal.display import DisplayFactory, default_display
from wakeful.training.cluster import (
    JobResult,
    Work,
    cluster_of,
    distribute_work,
    job_result,
    run_work,
    train_from_table,
)
from wakeful_papers.exhibits.plan import Plan, heirs_table
from wakeful_papers.heirs import inherit_with_baselines

Judge = Callable[[str, Path], object]
"""What looks at an exhibit's runs and judges its claims, given its name and folder."""


def inherit_all(
    source: str, table: Mapping[str, Any], baselines: Sequence[str], place: str
) -> JobResult:
    """Carry an inheritance out, or go on with it; a reference that diverged has no heirs."""
    if (Path(source) / "run.json").is_file() and not is_done(Path(source)):
        return JobResult()
    return job_result(
        lambda: inherit_with_baselines(source, table, baselines, Path(place), default_display)
    )


def judge_one(judge: Judge, name: str, place: str) -> JobResult:
    """Judge an exhibit."""
    return job_result(lambda: judge(name, Path(place)))


def dealt_out(
    plans: Mapping[Path, Plan],
    runs: Path,
    place: Path,
    cluster: str,
    display: DisplayFactory,
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
            after = {work[path].label for path in own}
            name, own_place = plan.exhibit.name, folder.absolute()
            call = judge_one, judge, name, str(own_place)
            # A page is written anew, whatever is there.
            work[folder] = Work(name, own_place, call, after, shows_done=False)
    runs_of = {each.label for each in work.values() if each.call[0] is train_from_table}
    may_diverge = runs_of - baselines
    names = [plan.exhibit.name for plan in plans.values()]
    with display(names[0] if len(names) == 1 else f"{len(names)} exhibits") as show:
        faults = distribute_work(
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
                found[path] = run_work(label, job.seeded(seed), path.absolute())
                if job.row == plan.exhibit.table.baseline:
                    baselines.add(label)
            if plan.heirs_of(job):
                own = runs / plan.heirs_folder(job, seed) / f"seed-{seed}"
                label = labels.setdefault(own, f"{prefix}inheritance from {name}")
                source, after = (
                    (given.source, ()) if given else (str(path.absolute()), (labels[path],))
                )
                table, heirs = dict(heirs_table(plan, job, seed)), own.absolute()
                beside = plan.heirs[job.group].baseline
                found[own] = Work(
                    label, heirs, (inherit_all, source, table, beside, str(heirs)), after
                )
    return found
