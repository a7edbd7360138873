"""Trials of learning rates, carried out before the runs of an exhibit that tunes them."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from wakeful.errors import Diverged, WakefulError
from wakeful.runs.records import RunSummary
from wakeful.runs.run import Run, is_done, read_record
from wakeful.terminal.display import DisplayFactory
from wakeful_papers.exhibits.plan import Job, Plan
from wakeful_papers.exhibits.tuning import at_rate, best_rate
from wakeful_papers.verbs.runs import train_job

Train = Callable[[Plan], object]
"""What trains all jobs of a plan; those that diverge are left unfinished."""


def tuned(plan: Plan, runs: Path, run: Run, train: Train) -> Plan:
    """Return a plan with the best rate of each row; one that tunes nothing is as it was.

    Trials lie among the runs, so that they are made once, whatever goes on with them; what they
    came to is written to tuned.json of the exhibit's `run`.
    """
    rule = plan.tuning
    if rule is None:
        return plan
    tried: dict[Job, dict[float, float]] = {job: {} for job in plan.tunes}
    while trials := {
        (job, multiple): plan.trial(job, multiple)
        for job, losses in tried.items()
        for multiple in rule.left(losses)
    }:
        train(plan.of_trials(trials.values()))
        for (job, multiple), trial in trials.items():
            tried[job][multiple] = _loss(runs / trial.folder / f"seed-{rule.seed}")
    found = {
        _name(job): {
            f"{job.config.optimizer.lr * each:g}": loss if math.isfinite(loss) else None
            for each, loss in sorted(losses.items())
        }
        for job, losses in tried.items()
    }
    run.write_json("tuned.json", found)
    return _at_multiples(plan, {job: best_rate(losses) for job, losses in tried.items()})


def at_rates_of(plan: Plan, path: Path) -> Plan:
    """Return a plan with the best rate of each row in a file that `tuned` wrote.

    Raises:
        WakefulError: the exhibit tunes no learning rates, or the file is missing or invalid, has
            other rows, or lacks a rate at which a row was trained.
    """
    if plan.tuning is None:
        raise WakefulError(
            f"{plan.exhibit.name} tunes no learning rates at the {plan.scale} scale: leave out "
            "--tuned"
        )
    tried = read_record(dict[str, dict[str, float | None]], path)
    rows = {_name(job): job for job in plan.tunes}
    if tried.keys() != rows.keys():
        raise WakefulError(
            f"{path} is not of {plan.exhibit.name}: its rows are {', '.join(tried) or 'none'}, the "
            f"exhibit's {', '.join(rows)}"
        )
    multiples: dict[Job, float] = {}
    for name, losses in tried.items():
        try:
            rate = best_rate({float(key): loss for key, loss in losses.items() if loss is not None})
        except ValueError:
            raise WakefulError(f"{path} has no learning rate at which {name} was trained") from None
        multiples[rows[name]] = rate / rows[name].config.optimizer.lr
    return _at_multiples(plan, multiples)


def _name(job: Job) -> str:
    return " ".join(filter(None, (job.group, job.row)))


def _at_multiples(plan: Plan, multiples: Mapping[Job, float]) -> Plan:
    """Return a plan whose jobs have these multiples of their rates, and that tunes nothing."""
    of_rows = {(job.group, job.row): multiple for job, multiple in multiples.items()}
    jobs = [
        dataclasses.replace(job, config=at_rate(job.config, of_rows[job.group, plan.tuned_as(job)]))
        for job in plan.jobs
    ]
    return dataclasses.replace(plan, jobs=tuple(jobs), tuning=None)


def train_here(runs: Path, display: DisplayFactory) -> Train:
    """Return what trains a plan's jobs one after another in this process."""

    def train(plan: Plan) -> None:
        for job in plan.jobs:
            for seed in plan.seeds:
                try:
                    train_job(job, seed, runs / job.folder / f"seed-{seed}", display)
                except Diverged:
                    continue

    return train


def _loss(path: Path) -> float:
    if not is_done(path):
        return math.inf
    return Run.open(path).read(RunSummary, "summary.json").validation.loss
