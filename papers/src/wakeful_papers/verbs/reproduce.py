"""The verb reproduce: a paper's figure or table in, its claims judged and a page out."""

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
from wakeful_papers.exhibits.derived import check_figure, tidy
from wakeful_papers.exhibits.exhibit import (
    SCALES,
    Exhibit,
    exhibit,
    exhibit_names,
    expanded,
    natural,
)
from wakeful_papers.exhibits.judge import Judged
from wakeful_papers.exhibits.judge import verdicts as judged
from wakeful_papers.exhibits.plan import Plan, plan_of
from wakeful_papers.exhibits.size import H100
from wakeful_papers.exhibits.total import Total, total_of
from wakeful_papers.options import ReproduceOptions
from wakeful_papers.reports.claims import claims_report
from wakeful_papers.reports.reproduction import headline, reproduction_report, sentence
from wakeful_papers.verbs.jobs import dealt_out
from wakeful_papers.verbs.models import Known, check_models
from wakeful_papers.verbs.runs import GRADIENTS, OF_DECODER, PROBES, by_shots, carried_out
from wakeful_papers.verbs.tuning import at_rates_of, train_here, tuned

CLAIMS = "claims.html"
"""The page of several exhibits, beside their folders."""
Finished = Callable[[str], bool]
"""Whether a run is finished, by its name among the runs."""
FIGURES = {"group": pl.String, "row": pl.String, "seed": pl.Int64, "figure": pl.String,
           "value": pl.Float64}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Header(Header):
    """run.json of an exhibit."""

    scale: str
    given: tuple[str, ...]
    """What was asked for in place of the scale's own, as it is written on the command line."""


@dataclass(frozen=True, eq=False, repr=False)
class Reproduction(StoredResult):
    """Exhibits that were run: the figures, and what became of their claims."""

    path: Path
    """The last exhibit's folder."""
    page: Path
    """The page of a single exhibit, or that of all their claims."""
    found: tuple[Judged, ...]
    told: Report
    """What the page tells."""
    left_out: tuple[str, ...] = ()
    """Of all exhibits those that could not be run, and why."""
    last: Report | None = None
    """Of several exhibits the last one's own."""

    @property
    def frame(self) -> pl.DataFrame:
        """A row a group, row, seed and figure of the last exhibit."""
        return read_frame(self.path / "figures.parquet", FIGURES)

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json of the last exhibit: its rows' figures and its verdicts."""
        return to_table(self.found[-1])

    @property
    def verdicts(self) -> list[str]:
        """Each claim's verdict, of all exhibits."""
        return [sentence(each) for judged in self.found for each in judged.verdicts]

    @property
    def report(self) -> Report:
        """What became of every claim."""
        return self.told

    def picture(self) -> Drawing | None:
        """Return the last exhibit as the paper draws it."""
        return (self.last or self.report).picture


def reproduce(
    *names: str,
    display: DisplayFactory | None = None,
    options: ReproduceOptions | None = None,
    **kwargs: Any,
) -> Reproduction:
    """Run exhibits of the papers at a scale and judge their claims by 95% intervals over seeds.

        wakeful_papers.reproduce("value-residual/fig6", scale="tiny")

    The same call goes on with what was interrupted. Training runs are shared: what another exhibit
    beside this one has trained alike is not trained again.

    Args:
        names: exhibits, PAPER/EXHIBIT, or papers for all of theirs, such as headline; none with
            `all=True`.
        display: shows progress; None is a bar where there is a terminal.
        options: `ReproduceOptions`, whose fields are keyword arguments too.

    Raises:
        WakefulError: an exhibit does not exist, it needs a text, a model or tasks that are missing,
            it fits neither memory nor disk, its folder holds another exhibit, or a run fails. What
            can be checked is checked before anything is written.
    """
    options = options_from(ReproduceOptions, kwargs, options)
    names = _asked_for(names, options)
    display = display or default_display
    runs = Path(options.runs or exhibit_folder(names[0], options).absolute().parent / "runs")
    finished = cache(lambda name: is_done(runs / name))
    plans, left_out = _chosen(names, options, runs, finished)
    if len(plans) > 1:
        with display(f"{len(plans)} exhibits") as show:
            total = total_of(plans.values(), finished)
            show.note(f"{len(plans)} exhibits: {_told(total, options)}")
    plans = {place: _tuned(plan, place, runs, options, display) for place, plan in plans.items()}
    shared = bool(options.cluster) and len(plans) > 1
    faults = _shared_out(plans, runs, options, display) if shared else {}
    done: list[tuple[Path, Judged, Report | None]] = []
    for place, plan in plans.items():
        with _or_left_out(plan.exhibit.name, options, left_out):
            if shared and place != list(plans)[-1]:  # the last one's report is returned
                done.append((place, _kept(place, faults), None))
            else:
                done.append((place, *_work(plan, place, runs, options, display)))
    if not done:
        raise WakefulError(f"no exhibit could be run; {left_out[0]}")
    last, one, told = done[-1]
    if len(done) == 1 and told is not None and not left_out:
        return Reproduction(last, last / "report.html", (one,), told)
    every = {place: one for place, one, _ in done}
    claimed = _claimed(every, last.parent / CLAIMS, left_out)
    return dataclasses.replace(claimed, last=told)


def _asked_for(names: Sequence[str], options: ReproduceOptions) -> tuple[str, ...]:
    """Return the exhibits to run.

    Raises:
        WakefulError: none is named, or the options do not fit those that are.
    """
    if options.all and names:
        raise WakefulError(f"--all runs every exhibit: leave out {', '.join(names)}")
    if options.all:
        return tuple(name for name in exhibit_names() if not exhibit(name).settings)
    names = expanded(names)
    if not names:
        raise WakefulError("name an exhibit, PAPER/EXHIBIT; wakeful reproduce lists them")
    for option, what in (("out", "one exhibit's folder"), ("tuned", "one exhibit's file")):
        if len(names) > 1 and getattr(options, option):
            raise WakefulError(f"--{option} is {what}, and {len(names)} are named")
    if options.tasks and not any(exhibit(name).tasks for name in names):
        none = f"{names[0]} asks no" if len(names) == 1 else f"none of {len(names)} exhibits asks"
        raise WakefulError(f"{none} tasks: leave out --tasks")
    return names


def _claimed(every: Mapping[Path, Judged], page: Path, left_out: Sequence[str]) -> Reproduction:
    """Write the page of exhibits' claims."""
    told, found = claims_report(every, page, left_out), tuple(every.values())
    return Reproduction([*every][-1], write_page(told, page), found, told, tuple(left_out))


def claims(
    *folders: Path, out: str | Path = "", title: str = "", figures: Sequence[FigureFormat] = ()
) -> Reproduction:
    """Write the page of finished exhibits; without `out` it is beside the first one's folder.

    Those that are unfinished are left out, and the page names them.

    Raises:
        WakefulError: none is finished, or a title or charts are asked for.
    """
    if title or figures:
        raise WakefulError(
            "the page of exhibits has its own title and no charts: leave out --title and --figures"
        )
    every: dict[Path, Judged] = {}
    left_out: list[str] = []
    for folder in folders:
        header = Run.open(folder).header
        if header.status == "done":
            every[folder] = read_record(Judged, folder / "summary.json")
        else:
            left_out.append(f"{folder.name} is unfinished: give its wakeful reproduce again first")
    if not every:
        raise WakefulError("; ".join(left_out))
    every = dict(sorted(every.items(), key=lambda entry: natural(entry[1].exhibit)))
    return _claimed(every, Path(out or folders[0].parent / CLAIMS), left_out)


def planned(found: Exhibit, options: ReproduceOptions) -> Plan:
    """Return what an exhibit takes with these options."""
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
    plan = plan_of(
        found, options.scale, seeds=options.seeds, changes=changes, models=options.models,
        tasks=options.tasks,
    )  # fmt: skip
    if options.tuned:
        plan = at_rates_of(plan, Path(options.tuned))
    for name in found.probes:
        known = (*PROBES, GRADIENTS, *OF_DECODER)
        if name not in known:
            raise WakefulError(f"{found.name}: no probe {name!r}{did_you_mean(name, known)}")
    for expression in _expressions(found):
        check_figure(expression)
    return plan


def _chosen(
    names: Sequence[str], options: ReproduceOptions, runs: Path, finished: Finished
) -> tuple[dict[Path, Plan], list[str]]:
    """Return the exhibits that can be run, by their folders, and of all those that cannot, and why.

    Raises:
        WakefulError: one that is named cannot be run.
    """
    plans: dict[Path, Plan] = {}
    left_out: list[str] = []
    known: Known = {}
    cluster = _cluster(options)
    for name in names:
        with _or_left_out(name, options, left_out):
            plan = planned(exhibit(name), options)
            place = exhibit_folder(name, options)
            _check_folder(plan, place, options.given)
            check_fits([*plans.values(), plan], runs, finished, cluster)
            check_models(plan, known)
            plans[place] = plan
    return plans, left_out


@contextlib.contextmanager
def _or_left_out(name: str, options: ReproduceOptions, left_out: list[str]) -> Iterator[None]:
    """With --all, add to `left_out` why an exhibit cannot be run, with its name once."""
    try:
        yield
    except WakefulError as error:
        if not options.all or isinstance(error, Interrupted):
            raise
        left_out.append(str(error) if str(error).startswith(name) else f"{name}: {error}")


def _cluster(options: ReproduceOptions) -> Cluster | None:
    """Return where runs are trained; None is here."""
    return cluster_of(options.cluster) if options.cluster else None


def exhibit_folder(name: str, options: ReproduceOptions) -> Path:
    """Return an exhibit's folder."""
    return Path(options.out or f"runs/reproduce/{options.scale}/{name.replace('/', '-')}")


def _check_folder(plan: Plan, place: Path, given: Sequence[str]) -> None:
    """Raise `WakefulError` where another exhibit, or anything else, is in the folder.

    One with other settings is another one: its page would be lost.
    """
    if not place.exists() or (place.is_dir() and not any(place.iterdir())):
        return
    run = Run.open(place)
    if run.header.kind != "reproduce":
        raise WakefulError(f"{place} is not an exhibit's folder; choose another with --out")
    header = run.read(_Header, "run.json")
    there = (header.name, header.scale, header.seeds, header.given)
    if there != (plan.exhibit.name, plan.scale, plan.seeds, tuple(given)):
        seeds = ", ".join(map(str, header.seeds))
        settings = ", ".join(header.given) or "no other setting"
        raise WakefulError(
            f"{place} is of {header.name} at the {header.scale} scale with seeds {seeds} and "
            f"{settings}; choose another folder with --out"
        )


def check_fits(
    plans: Sequence[Plan], runs: Path, finished: Finished, cluster: Cluster | None = None
) -> None:
    """Raise `WakefulError` where memory cannot hold the last one's largest run, or the disk all
    runs that are still to come, with the figure.

    Workers of this machine without GPUs of their own share its memory. A scheduler's jobs take
    that of other machines, which is not known here.
    """
    plan, at_once = plans[-1], 1
    if cluster and cluster.engine != "local":
        at_once = 0
    elif cluster and not cluster.gpus:
        at_once = cluster.workers
    device = choose_device(plan.config.train.device or "auto")
    needed, room = plan.memory_of(at_once), free_memory(device)
    if needed > room:
        fewer = "fewer workers, " if needed > plan.memory else ""
        raise WakefulError(
            f"{plan.exhibit.name} at the {plan.scale} scale takes about {_size(needed)} of "
            f"memory ({plan.parameters / 1e6:,.1f}M parameters"
            f"{' in training' if plan.jobs else ''}"
            f"{f', {at_once} runs at a time' if fewer else ''}), and there are "
            f"{_size(room)} free: choose {fewer}a smaller --scale or another --device"
        )
    above = runs.absolute()
    while not above.exists():
        above = above.parent
    free = shutil.disk_usage(above).free
    disk = total_of(plans, finished).disk
    if disk > free:
        others = f" with the {len(plans) - 1} before it" if len(plans) > 1 else ""
        raise WakefulError(
            f"{plan.exhibit.name} at the {plan.scale} scale{others} takes about {_size(disk)} of "
            f"disk, and {above} has {_size(free)} free: choose a smaller --scale or another --runs"
        )


def _told(total: Total, options: ReproduceOptions) -> str:
    """Return what is still to be run, in words."""
    if not total.runs:
        return "all runs are finished"
    cluster = _cluster(options)
    told = (
        f"{total.runs:,} run{'' if total.runs == 1 else 's'}, {_count(total.tokens)} tokens; very "
        "roughly"
    )
    memory, disk = _size(total.memory), _size(total.disk)
    if cluster and cluster.engine != "local":
        return f"{told} {disk} of disk, and {memory} of memory where the largest run is trained"
    seconds = estimate_seconds(total.operations, choose_device(options.device or "auto"))
    return (
        f"{told} {format_duration(seconds)} on this machine, {memory} of memory and {disk} of disk"
    )


def _shared_out(
    plans: Mapping[Path, Plan], runs: Path, options: ReproduceOptions, display: DisplayFactory
) -> Mapping[Path, str]:
    """Let workers run and judge all exhibits; return what was wrong, by their folders."""
    faults: dict[Path, str] = {}
    sound: dict[Path, Plan] = {}
    for place, plan in plans.items():
        with display(plan.exhibit.name) as show:
            try:
                _prepare(plan, show)
                sound[place] = plan
            except WakefulError as error:
                if not options.all:
                    raise
                faults[place] = str(error)
    if not sound:
        return faults
    judge = partial(_judge, dataclasses.replace(options, cluster=""), str(runs.absolute()))
    where = next(iter(sound)).parent
    return faults | dealt_out(sound, runs, where, options.cluster, display, judge)


def _kept(place: Path, faults: Mapping[Path, str]) -> Judged:
    """Return what a worker found of an exhibit; raise what was wrong with it."""
    if place in faults:
        raise WakefulError(faults[place])
    return read_record(Judged, place / "summary.json")


def _judge(options: ReproduceOptions, runs: str, name: str, place: Path) -> None:
    """Look at an exhibit's runs and judge it, as the work of a cluster."""
    plan = _tuned(planned(exhibit(name), options), place, Path(runs), options, default_display)
    _work(plan, place, Path(runs), options, default_display)


def _tuned(
    plan: Plan, place: Path, runs: Path, options: ReproduceOptions, display: DisplayFactory
) -> Plan:
    """Return a plan with its rows' learning rates, tried first where the exhibit tunes them."""
    if plan.tuning is None:
        return plan
    with display(plan.exhibit.name) as show:
        _prepare(plan, show)
    run = _begun(plan, place, options)

    def deal(trials: Plan) -> None:
        dealt_out({place: trials}, runs, place, options.cluster, display)

    return tuned(plan, runs, run, deal if options.cluster else train_here(runs, display))


def _prepare(plan: Plan, show: Display) -> None:
    """Read the tasks and make the texts of an exhibit, and raise what its runs would raise.

    Of a text that only other models read, the beginning is read; the hub's not before they need it.
    """
    for tasks in by_shots(plan.tasks).values():
        show.note(f"preparing {', '.join(tasks)}")
        read_tasks(EvaluateOptions(tasks=tasks))
    trained = {job.folder: job.config for job in plan.jobs if plan.reference_of(job.group) is None}
    for config in trained.values():
        check_run(config, show.stage)
    of_heirs = (job.config.data.source for job in plan.jobs if plan.reference_of(job.group))
    read = [source for source in of_heirs if not is_prepared(Path(source))]
    read += [plan.config.data.source] if plan.existing else []
    for source in dict.fromkeys(read):
        if not source.startswith("hf:"):
            open_evaluation_data(source, LENGTH)


def _work(
    plan: Plan, place: Path, runs: Path, options: ReproduceOptions, display: DisplayFactory
) -> tuple[Judged, Report]:
    """Run what is missing of an exhibit, judge it and write its page."""
    with display(plan.exhibit.name) as show:
        _prepare(plan, show)
        total = total_of([plan], lambda name: is_done(runs / name))
        show.note(f"{plan.exhibit.name}: {_told(total, options)}")
    run = _begun(plan, place, options)
    with run.lock(), run.under_way():
        overflowed: Mapping[Path, str] = {}
        if options.cluster:
            overflowed = dealt_out({place: plan}, runs, place, options.cluster, display)
        results, facts = carried_out(plan, runs, place, display, overflowed)
        verdicts = judged(plan.exhibit, results, plan.scale, plan.tasks, plan.stood_in)
        expressions = list(_expressions(plan.exhibit))
        run.write_frame("figures.parquet", pl.DataFrame(tidy(results, expressions), schema=FIGURES))
        told = headline(plan, facts, results)
        one = Judged(
            exhibit=plan.exhibit.name, paper=plan.exhibit.paper, title=plan.exhibit.title,
            claim=plan.exhibit.claim, scale=plan.scale, headline=told, verdicts=verdicts,
        )  # fmt: skip
        run.write_json("summary.json", one)
        report = reproduction_report(plan, results, verdicts, facts)
        write_page(report, place / "report.html")
    save_figures(report.charts(), place / "figures", options.figures)
    return one, report


def _begun(plan: Plan, place: Path, options: ReproduceOptions) -> Run:
    """Return the run of an exhibit's folder, which is made where it is not there."""
    run = Run(place)
    if not (place / "run.json").is_file():
        facts = {
            "name": plan.exhibit.name, "scale": plan.scale, "seeds": list(plan.seeds),
            "given": list(options.given),
        }  # fmt: skip
        run.make("reproduce", facts)
    return run


def _expressions(found: Exhibit) -> Iterator[str]:
    """Yield every figure that an exhibit shows or judges, each once."""
    names = [column.figure for column in found.table.columns]
    names += [claim.figure for claim in found.claims]
    names += [claim.premise.figure for claim in found.claims if claim.premise]
    yield from dict.fromkeys(["loss", *names])


def exhibit_listing(options: ReproduceOptions | None = None) -> RenderableType:
    """Return a table of every exhibit: its claim, and what it takes here and at full size."""
    wanted = dataclasses.replace(options or ReproduceOptions(), tuned="")
    full = dataclasses.replace(wanted, scale="paper", steps=0, device="", dtype="")
    scales = {
        scale: full if scale == "paper" else dataclasses.replace(wanted, scale=scale)
        for scale in SCALES
    }
    plans = {scale: list[Plan]() for scale in SCALES}
    speed = estimate_seconds(1.0, choose_device(wanted.device or "auto"))
    grid = Grid(box=None, pad_edge=False, header_style="bold")
    for column in ("exhibit", "claim"):
        grid.add_column(column)
    for column in ("tokens", "here", "paper's tokens", "H100 hours", "on eight", "memory"):
        grid.add_column(column, justify="right", no_wrap=True)
    for paper, names in groupby(exhibit_names(), key=lambda name: exhibit(name).paper):
        grid.add_row(Text(paper, style="bold"))
        for name in names:
            found = exhibit(name)
            if found.settings:
                told = Text(f"{found.claim} Nothing to measure: {found.settings}.", style="dim")
                grid.add_row(Text(name, style="dim"), told)
                continue
            for scale, given in scales.items():
                plans[scale].append(planned(found, given))
            here, there = (total_of([plans[scale][-1]]) for scale in (wanted.scale, "paper"))
            hours, on_eight = (count / H100 / 3600 for count in (there.operations, there.on_eight))
            needs = ", ".join(plans["paper"][-1].needs)
            if wanted.scale != "paper":
                needs = (
                    f"{', '.join(plans[wanted.scale][-1].needs)} (of the paper's scale: {needs})"
                )
            claim = Text.assemble(found.claim, ("\nNeeds ", "dim"), (needs, "dim"))
            grid.add_row(
                name, claim, _count(here.tokens), format_duration(here.operations * speed),
                _count(there.tokens), _hours(hours), _hours(on_eight), _size(there.memory),
            )  # fmt: skip
    told = (
        f"Tokens, time here and needs are at the {wanted.scale} scale, the rest at the paper's "
        "with one seed and bfloat16 at two fifths of an H100's peak; on eight H100s each run takes "
        "one card. Times are very rough. Run one with wakeful reproduce PAPER/EXHIBIT --scale "
        "tiny|small|paper."
    )
    totals = [Text("All of them, what they share once:", style="bold")]
    for scale, every in plans.items():
        total = total_of(every)
        time = f"{format_duration(total.operations * speed)} here"
        if scale == "paper":
            time = f"{_hours(total.operations / H100 / 3600)} H100 hours"
        totals.append(Text(
            f"  {scale}: {total.runs:,} runs, {_count(total.tokens)} tokens, {time}, "
            f"{_size(total.memory)} of memory, {_size(total.disk)} of disk"
        ))  # fmt: skip
    return Group(grid, Text(), *totals, Text(), Text(told, style="dim"))


def _size(count: float) -> str:
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{max(1, round(count / 1e6)):,} MB"


def _count(tokens: float) -> str:
    return f"{tokens / 1e9:,.1f}B" if tokens >= 1e9 else f"{tokens / 1e6:,.1f}M"


def _hours(count: float) -> str:
    return f"{count:,.0f}" if count >= 10 else f"{count:.2g}"
