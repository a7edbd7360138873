"""The verb reproduce: runs a paper's figure or table, judges its claims and writes a page."""

import contextlib
import dataclasses
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import polars as pl
from rich.console import Group, RenderableType
from rich.table import Table as Grid
from rich.text import Text

from wakeful.config.keywords import options_from
from wakeful.config.reading import LENGTH, FigureFormat
from wakeful.config.tables import to_table
from wakeful.data.tokens import is_prepared
from wakeful.device import choose_device, estimate_seconds, free_memory
from wakeful.errors import Interrupted, WakefulError, did_you_mean
from wakeful.evaluation.options import EvaluateOptions
from wakeful.evaluation.task_set import read_tasks
from wakeful.loading.reading import open_evaluation_data
from wakeful.reports.charts import Drawing, save_figures
from wakeful.reports.html import write_page
from wakeful.reports.result import StoredResult
from wakeful.reports.value import Report
from wakeful.runs.run import Header, Run, is_done, read_frame, read_record
from wakeful.terminal.display import Display, DisplayFactory, default_display, format_duration
from wakeful.training.cluster import Cluster, cluster_of
from wakeful.training.setup import check_run
from wakeful_papers.exhibits.derived import check_figure, figure_rows
from wakeful_papers.exhibits.exhibit import (
    SCALES,
    Exhibit,
    exhibit_names,
    expand_papers,
    natural_key,
    read_exhibit,
)
from wakeful_papers.exhibits.judge import JudgedExhibit, judge_claims
from wakeful_papers.exhibits.plan import Plan, plan_exhibit
from wakeful_papers.exhibits.size import H100
from wakeful_papers.exhibits.total import TotalCost, total_cost
from wakeful_papers.options import ReproduceOptions
from wakeful_papers.reports.claims import claims_report
from wakeful_papers.reports.reproduction import exhibit_report, format_headline, verdict_sentence
from wakeful_papers.verbs.jobs import distribute_plans
from wakeful_papers.verbs.models import ModelLocations, check_models
from wakeful_papers.verbs.runs import DECODER_PROBES, GRADIENTS, PROBES, group_by_shots, run_plan
from wakeful_papers.verbs.tuning import apply_tuned_rates, local_trainer, tune_plan

CLAIMS = "claims.html"
"""The page of several exhibits, next to their folders."""
Finished = Callable[[str], bool]
"""A function that returns True if the run of a name among the runs is finished."""
FIGURES = {"group": pl.String, "row": pl.String, "seed": pl.Int64, "figure": pl.String,
           "value": pl.Float64}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Header(Header):
    """run.json of an exhibit."""

    scale: str
    given: tuple[str, ...]
    """Settings in place of the scale's own, as written on the command line."""


@dataclass(frozen=True, eq=False, repr=False)
class Reproduction(StoredResult):
    """Exhibits that were run: their figures and the verdicts on their claims."""

    path: Path
    """The last exhibit's folder."""
    page: Path
    """The page of a single exhibit, or that of all their claims."""
    exhibits: tuple[JudgedExhibit, ...]
    page_report: Report
    """The page's report."""
    omissions: tuple[str, ...] = ()
    """Exhibits that could not be run or are unfinished, each with the reason."""
    last_report: Report | None = None
    """The last exhibit's own report, if `page` is that of all claims and this process ran it."""

    @property
    def frame(self) -> pl.DataFrame:
        """The last exhibit's figures: one row per group, row, seed and figure."""
        return read_frame(self.path / "figures.parquet", FIGURES)

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json of the last exhibit: what it claims, its scale in words, its verdicts."""
        return to_table(self.exhibits[-1])

    @property
    def verdicts(self) -> list[str]:
        """The verdicts on the claims of all exhibits, in sentences."""
        return [verdict_sentence(v) for exhibit in self.exhibits for v in exhibit.verdicts]

    @property
    def report(self) -> Report:
        """The page's report."""
        return self.page_report

    def picture(self) -> Drawing | None:
        """Return the last exhibit as the paper draws it; None without a chart or its report."""
        return (self.last_report or self.report).picture


def reproduce(
    *names: str,
    display: DisplayFactory | None = None,
    options: ReproduceOptions | None = None,
    **kwargs: Any,
) -> Reproduction:
    """Run exhibits of the papers at a scale and judge their claims by 95% intervals over seeds.

        wakeful_papers.reproduce("value-residual/fig6", scale="tiny")

    The same call resumes what was interrupted. Exhibits share training runs: a run is not trained
    again if another exhibit with the same folder of runs has trained it.

    Args:
        names: exhibits, PAPER/EXHIBIT, or papers for all of their exhibits, such as headline; none
            with `all=True`.
        display: shows progress; None shows a bar in a terminal.
        options: `ReproduceOptions`, whose fields are keyword arguments too.

    Raises:
        WakefulError: an exhibit does not exist, it needs a text, a model or tasks that are missing,
            it does not fit in memory or on the disk, its folder holds another exhibit, or a run
            fails. What can be checked is checked before anything is written.
    """
    options = options_from(ReproduceOptions, kwargs, options)
    names = _exhibits_to_run(names, options)
    display = display or default_display
    runs = Path(options.runs or exhibit_folder(names[0], options).absolute().parent / "runs")
    finished = cache(lambda name: is_done(runs / name))
    plans, omissions = _plan_exhibits(names, options, runs, finished)
    if len(plans) > 1:
        with display(f"{len(plans)} exhibits") as show:
            total = total_cost(plans.values(), finished)
            show.note(f"{len(plans)} exhibits: {_describe_cost(total, options)}")
    tuned: dict[Path, Plan] = {}
    for folder, plan in plans.items():
        with _record_failure(plan.exhibit.name, options, omissions):
            tuned[folder] = _tune(plan, folder, runs, options, display)
    is_distributed = bool(options.cluster) and len(tuned) > 1
    faults = _distribute_exhibits(tuned, runs, options, display) if is_distributed else {}
    exhibits: dict[Path, JudgedExhibit] = {}
    report: Report | None = None
    for folder, plan in tuned.items():
        with _record_failure(plan.exhibit.name, options, omissions):
            if is_distributed and folder != list(tuned)[-1]:  # the last one's report is returned
                exhibits[folder], report = _read_judged(plan.exhibit.name, folder, faults), None
            else:
                exhibits[folder], report = _run_exhibit(plan, folder, runs, options, display)
    if not exhibits:
        raise WakefulError(f"no exhibit could be run; {omissions[0]}")
    folder = list(exhibits)[-1]
    if len(exhibits) == 1 and report is not None and not omissions:
        return Reproduction(folder, folder / "report.html", tuple(exhibits.values()), report)
    reproduction = _write_exhibits_page(exhibits, folder.parent / CLAIMS, omissions)
    return dataclasses.replace(reproduction, last_report=report)


def _exhibits_to_run(names: Sequence[str], options: ReproduceOptions) -> tuple[str, ...]:
    """Return the names of the exhibits to run.

    Raises:
        WakefulError: no exhibit is named, one does not exist, or options do not fit the named ones.
    """
    if options.all and names:
        raise WakefulError(f"--all runs every exhibit: leave out {', '.join(names)}")
    if options.all:
        return tuple(name for name in exhibit_names() if not read_exhibit(name).settings)
    names = expand_papers(names)
    if not names:
        raise WakefulError("name an exhibit, PAPER/EXHIBIT; wakeful reproduce lists them")
    for option, meaning in (("out", "one exhibit's folder"), ("tuned", "one exhibit's file")):
        if len(names) > 1 and getattr(options, option):
            raise WakefulError(f"--{option} is {meaning}, and {len(names)} are named")
    if options.tasks and not any(read_exhibit(name).tasks for name in names):
        start = f"{names[0]} asks no" if len(names) == 1 else f"none of {len(names)} exhibits asks"
        raise WakefulError(f"{start} tasks: leave out --tasks")
    return names


def _write_exhibits_page(
    exhibits: Mapping[Path, JudgedExhibit], page: Path, omissions: Sequence[str]
) -> Reproduction:
    """Write the page of several exhibits' claims, which are given by their folders."""
    report = claims_report(exhibits, page, omissions)
    last, summaries = [*exhibits][-1], tuple(exhibits.values())
    return Reproduction(last, write_page(report, page), summaries, report, tuple(omissions))


def write_claims_page(
    *folders: Path, out: str | Path = "", title: str = "", figures: Sequence[FigureFormat] = ()
) -> Reproduction:
    """Write the page of finished exhibits to the file `out`, by default beside the first folder.

    Of unfinished exhibits the page has the names alone.

    Raises:
        WakefulError: a folder holds no exhibit, none is finished, or a title or charts are wanted.
    """
    if title or figures:
        raise WakefulError(
            "the page of exhibits has its own title and no charts: leave out --title and --figures"
        )
    exhibits: dict[Path, JudgedExhibit] = {}
    omissions: list[str] = []
    for folder in folders:
        header = Run.open(folder).header
        if header.status == "done":
            exhibits[folder] = read_record(JudgedExhibit, folder / "summary.json")
        else:
            omissions.append(f"{folder.name} is unfinished: give its wakeful reproduce again first")
    if not exhibits:
        raise WakefulError("; ".join(omissions))
    exhibits = dict(sorted(exhibits.items(), key=lambda entry: natural_key(entry[1].exhibit)))
    return _write_exhibits_page(exhibits, Path(out or folders[0].parent / CLAIMS), omissions)


def plan_with_options(exhibit: Exhibit, options: ReproduceOptions) -> Plan:
    """Return an exhibit's plan with the user's options; raise `WakefulError` if they do not fit."""
    changes: dict[str, Any] = {}
    if options.steps:
        changes["train.steps"] = options.steps
    if options.text:
        changes |= {"data.source": options.text, "data.validation_source": options.validation_text}
    if options.tokenizer:
        trains = options.tokenizer == "train"
        changes["data.tokenizer"] = "" if trains else options.tokenizer
    for name in ("device", "dtype", "compile"):
        if getattr(options, name):
            changes[f"train.{name}"] = getattr(options, name)
    plan = plan_exhibit(
        exhibit, options.scale, seeds=options.seeds, changes=changes, models=options.models,
        tasks=options.tasks,
    )  # fmt: skip
    if options.tuned:
        plan = apply_tuned_rates(plan, Path(options.tuned))
    for name in exhibit.probes:
        probes = (*PROBES, GRADIENTS, *DECODER_PROBES)
        if name not in probes:
            raise WakefulError(f"{exhibit.name}: no probe {name!r}{did_you_mean(name, probes)}")
    for expression in _figure_expressions(exhibit):
        check_figure(expression)
    return plan


def _plan_exhibits(
    names: Sequence[str], options: ReproduceOptions, runs: Path, finished: Finished
) -> tuple[dict[Path, Plan], list[str]]:
    """Return the plans by their exhibits' folders, and with --all why other exhibits cannot be run.

    Raises:
        WakefulError: an exhibit that the user names cannot be run.
    """
    plans: dict[Path, Plan] = {}
    omissions: list[str] = []
    locations: ModelLocations = {}
    cluster = _choose_cluster(options)
    for name in names:
        with _record_failure(name, options, omissions):
            plan = plan_with_options(read_exhibit(name), options)
            folder = exhibit_folder(name, options)
            remedy = "choose another with --out" if len(names) == 1 else "move it away"
            _check_folder(plan, folder, options.settings, remedy)
            check_fits([*plans.values(), plan], runs, finished, cluster)
            check_models(plan, locations)
            plans[folder] = plan
    return plans, omissions


@contextlib.contextmanager
def _record_failure(name: str, options: ReproduceOptions, omissions: list[str]) -> Iterator[None]:
    """With --all, catch an exhibit's error but `Interrupted`, and add its text to `omissions`."""
    try:
        yield
    except WakefulError as error:
        if not options.all or isinstance(error, Interrupted):
            raise
        omissions.append(_name_exhibit(name, str(error)))


def _name_exhibit(name: str, message: str) -> str:
    """Return an error message that begins with the name of its exhibit."""
    return message if message.startswith(name) else f"{name}: {message}"


def _choose_cluster(options: ReproduceOptions) -> Cluster | None:
    """Return the cluster that trains the runs; None if this process does."""
    return cluster_of(options.cluster) if options.cluster else None


def exhibit_folder(name: str, options: ReproduceOptions) -> Path:
    """Return an exhibit's folder."""
    return Path(options.out or f"runs/reproduce/{options.scale}/{name.replace('/', '-')}")


def _check_folder(plan: Plan, folder: Path, settings: Sequence[str], remedy: str) -> None:
    """Raise `WakefulError` with a remedy if another exhibit, or anything else, is in the folder.

    The same exhibit with other settings counts as another one, because its page would be lost.
    """
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    run = Run.open(folder)
    if run.header.kind != "reproduce":
        raise WakefulError(f"{folder} is not an exhibit's folder; {remedy}")
    header = run.read(_Header, "run.json")
    existing = (header.name, header.scale, header.seeds, header.given)
    if existing != (plan.exhibit.name, plan.scale, plan.seeds, tuple(settings)):
        seeds = ", ".join(map(str, header.seeds))
        existing_settings = ", ".join(header.given) or "no other setting"
        raise WakefulError(
            f"{folder} is of {header.name} at the {header.scale} scale with seeds {seeds} and "
            f"{existing_settings}; {remedy}"
        )


def check_fits(
    plans: Sequence[Plan], runs: Path, finished: Finished, cluster: Cluster | None = None
) -> None:
    """Raise `WakefulError` if memory cannot hold the last plan's largest run, or the disk the runs
    of all plans that remain; the message has the sizes.

    Workers on this machine without GPUs of their own share its memory: their largest runs must fit
    together. A scheduler's jobs use the memory of other machines, which is unknown here.
    """
    plan, parallel_runs = plans[-1], 1
    if cluster and cluster.engine != "local":
        parallel_runs = 0
    elif cluster and not cluster.gpus:
        parallel_runs = cluster.workers
    device = choose_device(plan.config.train.device or "auto")
    needed, available = plan.memory_of(parallel_runs), free_memory(device)
    if needed > available:
        fewer = "fewer workers, " if needed > plan.memory else ""
        raise WakefulError(
            f"{plan.exhibit.name} at the {plan.scale} scale takes about {_format_bytes(needed)} of "
            f"memory ({plan.parameters / 1e6:,.1f}M parameters"
            f"{' in training' if plan.jobs else ''}"
            f"{f', {parallel_runs} runs at a time' if fewer else ''}), and there are "
            f"{_format_bytes(available)} free: choose {fewer}a smaller --scale or another --device"
        )
    parent = runs.absolute()
    while not parent.exists():
        parent = parent.parent
    free = shutil.disk_usage(parent).free
    disk = total_cost(plans, finished).disk
    if disk > free:
        before = f" with the {len(plans) - 1} before it" if len(plans) > 1 else ""
        raise WakefulError(
            f"{plan.exhibit.name} at the {plan.scale} scale{before} takes about "
            f"{_format_bytes(disk)} of disk, and {parent} has {_format_bytes(free)} free: choose a "
            "smaller --scale or another --runs"
        )


def _describe_cost(total: TotalCost, options: ReproduceOptions) -> str:
    """Return the cost of the runs that remain, in words."""
    if not total.runs:
        return "all runs are finished"
    cluster = _choose_cluster(options)
    count = f"{total.runs:,} run{'' if total.runs == 1 else 's'}"
    text = f"{count}, {_format_tokens(total.tokens)} tokens; very roughly"
    memory, disk = _format_bytes(total.memory), _format_bytes(total.disk)
    if cluster and cluster.engine != "local":
        return f"{text} {disk} of disk, and {memory} of memory where the largest run is trained"
    seconds = estimate_seconds(total.operations, choose_device(options.device or "auto"))
    duration = format_duration(seconds)
    return f"{text} {duration} on this machine, {memory} of memory and {disk} of disk"


def _distribute_exhibits(
    plans: Mapping[Path, Plan], runs: Path, options: ReproduceOptions, display: DisplayFactory
) -> Mapping[Path, str]:
    """Let a cluster run and judge all exhibits; return error messages by folders of what failed."""
    faults: dict[Path, str] = {}
    prepared: dict[Path, Plan] = {}
    for folder, plan in plans.items():
        with display(plan.exhibit.name) as show:
            try:
                _prepare(plan, show)
                prepared[folder] = plan
            except WakefulError as error:
                if not options.all:
                    raise
                faults[folder] = str(error)
    if not prepared:
        return faults
    judge = partial(_judge, dataclasses.replace(options, cluster=""), str(runs.absolute()))
    log_folder = next(iter(prepared)).parent
    return faults | distribute_plans(prepared, runs, log_folder, options.cluster, display, judge)


def _read_judged(name: str, folder: Path, faults: Mapping[Path, str]) -> JudgedExhibit:
    """Return an exhibit that a worker judged, or raise the error that it met, with its name."""
    if folder in faults:
        raise WakefulError(_name_exhibit(name, faults[folder]))
    return read_record(JudgedExhibit, folder / "summary.json")


def _judge(options: ReproduceOptions, runs: str, name: str, folder: Path) -> None:
    """Run what is missing of an exhibit and judge it, as work for a cluster."""
    plan = plan_with_options(read_exhibit(name), options)
    plan = _tune(plan, folder, Path(runs), options, default_display)
    _run_exhibit(plan, folder, Path(runs), options, default_display)


def _tune(
    plan: Plan, folder: Path, runs: Path, options: ReproduceOptions, display: DisplayFactory
) -> Plan:
    """Return a plan with its rows' learning rates, after their trials if the exhibit tunes them."""
    if plan.tuning is None:
        return plan
    with display(plan.exhibit.name) as show:
        _prepare(plan, show)
    run = _open_run(plan, folder, options)

    def distribute(trials: Plan) -> None:
        distribute_plans({folder: trials}, runs, folder, options.cluster, display)

    train = distribute if options.cluster else local_trainer(runs, display)
    return tune_plan(plan, runs, run, train)


def _prepare(plan: Plan, show: Display) -> None:
    """Read the tasks and prepare the texts of an exhibit, and raise the errors of its runs early.

    Of a text for existing models or their heirs just the beginning is read, none of the hub's.
    """
    for tasks in group_by_shots(plan.tasks).values():
        show.note(f"preparing {', '.join(tasks)}")
        read_tasks(EvaluateOptions(tasks=tasks))
    trained = {job.folder: job.config for job in plan.jobs if plan.reference_of(job.group) is None}
    for config in trained.values():
        check_run(config, show.stage)
    heir_sources = (job.config.data.source for job in plan.jobs if plan.reference_of(job.group))
    sources = [source for source in heir_sources if not is_prepared(Path(source))]
    sources += [plan.config.data.source] if plan.existing else []
    for source in dict.fromkeys(sources):
        if not source.startswith("hf:"):
            open_evaluation_data(source, LENGTH)


def _run_exhibit(
    plan: Plan, folder: Path, runs: Path, options: ReproduceOptions, display: DisplayFactory
) -> tuple[JudgedExhibit, Report]:
    """Run what is missing of an exhibit, judge it and write its figures, page and charts."""
    with display(plan.exhibit.name) as show:
        _prepare(plan, show)
        total = total_cost([plan], lambda name: is_done(runs / name))
        show.note(f"{plan.exhibit.name}: {_describe_cost(total, options)}")
    run = _open_run(plan, folder, options)
    with run.lock(), run.under_way():
        divergences: Mapping[Path, str] = {}
        if options.cluster:
            divergences = distribute_plans({folder: plan}, runs, folder, options.cluster, display)
        results, facts = run_plan(plan, runs, folder, display, divergences)
        verdicts = judge_claims(plan.exhibit, results, plan.scale, plan.tasks, plan.stand_in_rows)
        expressions = list(_figure_expressions(plan.exhibit))
        figures = pl.DataFrame(figure_rows(results, expressions), schema=FIGURES)
        run.write_frame("figures.parquet", figures)
        headline = format_headline(plan, facts, results)
        summary = JudgedExhibit(
            exhibit=plan.exhibit.name, paper=plan.exhibit.paper, title=plan.exhibit.title,
            claim=plan.exhibit.claim, scale=plan.scale, headline=headline, verdicts=verdicts,
        )  # fmt: skip
        run.write_json("summary.json", summary)
        report = exhibit_report(plan, results, verdicts, facts)
        write_page(report, folder / "report.html")
    save_figures(report.charts(), folder / "figures", options.figures)
    return summary, report


def _open_run(plan: Plan, folder: Path, options: ReproduceOptions) -> Run:
    """Return the run of an exhibit's folder, which is created if it is missing."""
    run = Run(folder)
    if not (folder / "run.json").is_file():
        facts = {
            "name": plan.exhibit.name, "scale": plan.scale, "seeds": list(plan.seeds),
            "given": list(options.settings),
        }  # fmt: skip
        run.make("reproduce", facts)
    return run


def _figure_expressions(exhibit: Exhibit) -> Iterator[str]:
    """Yield the figures of an exhibit's table, claims and premises, each once, the loss first."""
    names = [column.figure for column in exhibit.table.columns]
    names += [claim.figure for claim in exhibit.claims]
    names += [claim.premise.figure for claim in exhibit.claims if claim.premise]
    yield from dict.fromkeys(["loss", *names])


def list_exhibits(options: ReproduceOptions | None = None) -> RenderableType:
    """Return a table of all exhibits: claims, and the costs at this scale and at the paper's."""
    options = dataclasses.replace(options or ReproduceOptions(), tuned="")
    paper_options = dataclasses.replace(options, scale="paper", steps=0, device="", dtype="")
    options_by_scale = {
        scale: paper_options if scale == "paper" else dataclasses.replace(options, scale=scale)
        for scale in SCALES
    }
    plans = {scale: list[Plan]() for scale in SCALES}
    speed = estimate_seconds(1.0, choose_device(options.device or "auto"))
    grid = Grid(box=None, pad_edge=False, header_style="bold")
    for column in ("exhibit", "claim"):
        grid.add_column(column)
    for column in ("tokens", "here", "paper's tokens", "H100 hours", "on eight", "memory"):
        grid.add_column(column, justify="right", no_wrap=True)
    for paper, names in groupby(exhibit_names(), key=lambda name: read_exhibit(name).paper):
        grid.add_row(Text(paper, style="bold"))
        for name in names:
            exhibit = read_exhibit(name)
            if exhibit.settings:
                text = f"{exhibit.claim} Nothing to measure: {exhibit.settings}."
                grid.add_row(Text(name, style="dim"), Text(text, style="dim"))
                continue
            for scale, scale_options in options_by_scale.items():
                plans[scale].append(plan_with_options(exhibit, scale_options))
            here, at_paper = (total_cost([plans[scale][-1]]) for scale in (options.scale, "paper"))
            counts = (at_paper.operations, at_paper.busiest_card)
            hours, busiest_hours = (count / H100 / 3600 for count in counts)
            needs = ", ".join(plans["paper"][-1].needs)
            if options.scale != "paper":
                scale_needs = ", ".join(plans[options.scale][-1].needs)
                needs = f"{scale_needs} (of the paper's scale: {needs})"
            claim = Text.assemble(exhibit.claim, ("\nNeeds ", "dim"), (needs, "dim"))
            grid.add_row(
                name, claim, _format_tokens(here.tokens), format_duration(here.operations * speed),
                _format_tokens(at_paper.tokens), _format_hours(hours), _format_hours(busiest_hours),
                _format_bytes(at_paper.memory),
            )  # fmt: skip
    note = (
        f"Tokens, time here and needs are at the {options.scale} scale, the rest at the paper's "
        "with its seeds, in bfloat16 at two fifths of an H100's peak; on eight H100s each run has "
        "one card. Times are very rough. Run one with wakeful reproduce PAPER/EXHIBIT --scale "
        "tiny|small|paper."
    )
    totals = [Text("All of them, what they share once:", style="bold")]
    for scale, scale_plans in plans.items():
        total = total_cost(scale_plans)
        time = f"{format_duration(total.operations * speed)} here"
        if scale == "paper":
            time = f"{_format_hours(total.operations / H100 / 3600)} H100 hours"
        totals.append(Text(
            f"  {scale}: {total.runs:,} runs, {_format_tokens(total.tokens)} tokens, {time}, "
            f"{_format_bytes(total.memory)} of memory, {_format_bytes(total.disk)} of disk"
        ))  # fmt: skip
    return Group(grid, Text(), *totals, Text(), Text(note, style="dim"))


def _format_bytes(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{max(1, round(count / 1e6)):,} MB"


def _format_tokens(tokens: float) -> str:
    return f"{tokens / 1e9:,.1f}B" if tokens >= 1e9 else f"{tokens / 1e6:,.1f}M"


def _format_hours(count: float) -> str:
    return f"{count:,.0f}" if count >= 10 else f"{count:.2g}"
