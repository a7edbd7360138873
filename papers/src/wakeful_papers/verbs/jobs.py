"""Runs, inheritances and judgments of exhibits as work for a cluster."""

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
"""A function that measures an exhibit's runs and judges its claims, given its name and folder."""


def run_inheritance(
    source: str, table: Mapping[str, Any], baselines: Sequence[str], folder: str
) -> JobResult:
    """Run or resume an inheritance; do nothing if its reference is a run that did not finish."""
    if (Path(source) / "run.json").is_file() and not is_done(Path(source)):
        return JobResult()
    return job_result(
        lambda: inherit_with_baselines(source, table, baselines, Path(folder), default_display)
    )


def judge_exhibit(judge: Judge, name: str, folder: str) -> JobResult:
    """Judge an exhibit."""
    return job_result(lambda: judge(name, Path(folder)))


def distribute_plans(
    plans: Mapping[Path, Plan], runs: Path, log_folder: Path, cluster: str,
    display: DisplayFactory, judge: Judge | None = None,
) -> dict[Path, str]:  # fmt: skip
    """Train on a cluster what is missing of plans, which are given by their exhibits' folders.

    With `judge` a worker judges each exhibit when its runs have ended, and no failure stops the
    rest; without it only runs but the baseline's, and heirs, may fail, by diverging. Return error
    messages by the folders of what failed. Jobs write their output below `log_folder`.
    """
    work = dict[Path, Work]()
    labels = dict[Path, str]()
    baselines: set[str] = set()
    for folder, plan in plans.items():
        name = plan.exhibit.name
        training = _training_work(plan, runs, f"{name}: " if judge else "", labels, baselines)
        work |= {path: unit for path, unit in training.items() if path not in work}
        if judge:
            after = {work[path].label for path in training}
            call = judge_exhibit, judge, name, str(folder.absolute())
            # A page is always written again.
            work[folder] = Work(name, folder.absolute(), call, after, shows_done=False)
    trains = train_from_table, run_inheritance
    may_diverge = {unit.label for unit in work.values() if unit.call[0] in trains} - baselines
    names = [plan.exhibit.name for plan in plans.values()]
    with display(names[0] if len(names) == 1 else f"{len(names)} exhibits") as show:
        faults = distribute_work(
            [*work.values()], cluster_of(cluster), log_folder.absolute(), show,
            may_diverge=may_diverge, may_fail=judge is not None,
        )  # fmt: skip
    return {path: faults[unit.label] for path, unit in work.items() if unit.label in faults}


def _training_work(
    plan: Plan, runs: Path, prefix: str, labels: dict[Path, str], baselines: set[str]
) -> dict[Path, Work]:
    """Return the work of an exhibit's runs and inheritances, by their folders.

    Labels are added to `labels`, since exhibits share runs, and those of baselines to `baselines`.
    """
    work: dict[Path, Work] = {}
    for seed in plan.seeds:
        for job in plan.jobs:
            path = runs / job.folder / f"seed-{seed}"
            name = f"{f'{job.group} {job.row}'.strip()}, seed {seed}"
            reference = plan.reference_of(job.group)
            if reference is None:
                label = labels.setdefault(path, f"{prefix}{name}")
                work[path] = run_work(label, job.config_with_seed(seed), path.absolute())
                if job.row == plan.exhibit.table.baseline:
                    baselines.add(label)
            if plan.heirs_of(job):
                heirs_path = runs / plan.heirs_folder(job, seed) / f"seed-{seed}"
                label = labels.setdefault(heirs_path, f"{prefix}inheritance from {name}")
                source, after = (
                    (reference.source, ()) if reference else (str(path.absolute()), (labels[path],))
                )
                table, heirs = dict(heirs_table(plan, job, seed)), heirs_path.absolute()
                call = run_inheritance, source, table, plan.heirs[job.group].baseline, str(heirs)
                work[heirs_path] = Work(label, heirs, call, after)
    return work
