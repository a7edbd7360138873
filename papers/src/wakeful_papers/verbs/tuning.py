"""Trials of learning rates, run before the runs of an exhibit that tunes them."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from pathlib import Path

from wakeful.errors import Diverged, WakefulError
from wakeful.runs.records import RunSummary
from wakeful.runs.run import Run, is_done, read_record
from wakeful.terminal.display import DisplayFactory
from wakeful_papers.exhibits.plan import Job, Plan
from wakeful_papers.exhibits.tuning import best_rate, multiply_rates
from wakeful_papers.verbs.runs import train_job

TrainPlan = Callable[[Plan], object]
"""A function that trains all jobs of a plan; those that diverge stay unfinished."""


def tune_plan(plan: Plan, runs: Path, run: Run, train: TrainPlan) -> Plan:
    """Return a plan with the best rate for each row; a plan without a rule is returned unchanged.

    Trials are kept among the runs, so that a finished one is not trained again. Their losses are
    written to tuned.json of the exhibit's `run`: by row and learning rate, None if one diverged.
    """
    rule = plan.tuning
    if rule is None:
        return plan
    losses_by_job: dict[Job, dict[float, float]] = {job: {} for job in plan.tuned_jobs}
    while trials := {
        (job, multiple): plan.trial_job(job, multiple)
        for job, losses in losses_by_job.items()
        for multiple in rule.remaining_multiples(losses)
    }:
        train(plan.trial_plan(trials.values()))
        for (job, multiple), trial in trials.items():
            losses_by_job[job][multiple] = _final_loss(runs / trial.folder / f"seed-{rule.seed}")
    record = {
        _row_name(job): {
            f"{job.config.optimizer.lr * multiple:g}": loss if math.isfinite(loss) else None
            for multiple, loss in sorted(losses.items())
        }
        for job, losses in losses_by_job.items()
    }
    run.write_json("tuned.json", record)
    return _apply_multiples(plan, {job: best_rate(losses) for job, losses in losses_by_job.items()})


def apply_tuned_rates(plan: Plan, path: Path) -> Plan:
    """Return a plan with the best rate for each row from a file that `tune_plan` wrote.

    Raises:
        WakefulError: the exhibit tunes no learning rates, or the file is missing or invalid, has
            other rows, or lacks a rate at which a row was trained.
    """
    if plan.tuning is None:
        raise WakefulError(
            f"{plan.exhibit.name} tunes no learning rates at the {plan.scale} scale: leave out "
            "--tuned"
        )
    losses_by_row = read_record(dict[str, dict[str, float | None]], path)
    rows = {_row_name(job): job for job in plan.tuned_jobs}
    if losses_by_row.keys() != rows.keys():
        raise WakefulError(
            f"{path} is not of {plan.exhibit.name}: its rows are "
            f"{', '.join(losses_by_row) or 'none'}, the exhibit's {', '.join(rows)}"
        )
    multiples: dict[Job, float] = {}
    for name, losses in losses_by_row.items():
        try:
            rate = best_rate({float(key): loss for key, loss in losses.items() if loss is not None})
        except ValueError:
            raise WakefulError(f"{path} has no learning rate at which {name} was trained") from None
        multiples[rows[name]] = rate / rows[name].config.optimizer.lr
    return _apply_multiples(plan, multiples)


def _row_name(job: Job) -> str:
    return " ".join(filter(None, (job.group, job.row)))


def _apply_multiples(plan: Plan, multiples: Mapping[Job, float]) -> Plan:
    """Return a plan whose jobs have these multiples of their rates, and that tunes nothing."""
    by_row = {(job.group, job.row): multiple for job, multiple in multiples.items()}
    scaled = (multiply_rates(j.config, by_row[j.group, plan.rate_row(j)]) for j in plan.jobs)
    jobs = [
        dataclasses.replace(job, config=config)
        for job, config in zip(plan.jobs, scaled, strict=True)
    ]
    return dataclasses.replace(plan, jobs=tuple(jobs), tuning=None)


def local_trainer(runs: Path, display: DisplayFactory) -> TrainPlan:
    """Return a function that trains a plan's jobs one after another in this process."""

    def train(plan: Plan) -> None:
        for job in plan.jobs:
            for seed in plan.seeds:
                try:
                    train_job(job, seed, runs / job.folder / f"seed-{seed}", display)
                except Diverged:
                    continue

    return train


def _final_loss(path: Path) -> float:
    if not is_done(path):
        return math.inf
    return Run.open(path).read(RunSummary, "summary.json").validation.loss
