"""Run directories, read with suspicion: JSON, TOML and parquet only, every field checked."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import polars as pl

from wakeful.config.rows import config_differences
from wakeful.config.schema import Config
from wakeful.errors import WakefulError, nearest
from wakeful.probes.base import block_outputs
from wakeful.runs.records import DataFacts, Evaluation, Summary, rows
from wakeful.runs.run import (
    METRICS,
    VALIDATION,
    Environment,
    Header,
    Run,
    is_done,
    read_frame,
    read_windows,
)

_OF_ONE_VARIANT = frozenset({
    "name", "data.source", "data.tokenizer", "train.seed", "train.device", "train.log_every",
    "train.checkpoint_every", "train.keep_checkpoints", "train.tensorboard", "train.wandb",
    "train.trackio",
})  # fmt: skip
"""Fields in which seeds of one variant may differ; of data and tokenizer the content counts."""


@dataclass(frozen=True)
class TrainedRun:
    """Files of a run; an unfinished one has no summary and no validation windows."""

    path: Path
    variant: str
    seed: int
    config: Config
    environment: Environment
    data: DataFacts
    done: Summary | None
    """None of a run under way."""
    metrics: pl.DataFrame
    validation: pl.DataFrame
    """One row per validation window: window, loss (mean nats per token), tokens."""
    followed: pl.DataFrame
    """Figures over steps, `step`, `figure` and `value`: means over layers, and a task's
    excess loss; no rows where nothing was asked for."""
    heads: pl.DataFrame
    """The same of each layer and head: `step`, `figure`, `layer`, `head` and `value`; no head in
    figures of a layer, and key/value heads in the value drain."""

    @property
    def summary(self) -> Summary:
        """The figures of a finished run."""
        assert self.done is not None
        return self.done


Pairs = list[tuple[TrainedRun, TrainedRun]]


@dataclass(frozen=True)
class ComparedRuns:
    """Finished runs of several variants, the first of which is the baseline."""

    name: str
    names: tuple[str, ...]
    """Every planned variant, in an order that does not change as runs finish."""
    runs: tuple[TrainedRun, ...]
    unfinished: tuple[str, ...]
    """Runs that are not in the tables, by name."""
    partial: tuple[TrainedRun, ...]
    """Those of them that have begun: what they have logged is in the training curves."""
    layouts: tuple[str, ...] = ()
    """Layouts of its page, by their names (`reports.layouts`)."""

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """Those that have a finished run."""
        finished = {run.variant for run in self.runs}
        return tuple(name for name in self.names if name in finished)

    @property
    def baseline(self) -> str:
        """The variant that differences are taken from."""
        return self.variants[0]

    def among(self, others: Sequence[str]) -> "ComparedRuns":
        """Return the comparison of the baseline with these variants alone.

        Raises:
            WakefulError: one is none of the variants that have finished.
        """
        for name in others:
            self._check_finished("only", name)
        kept = {self.baseline, *others}
        left = [name for name in self.names if name not in kept]
        return replace(
            self,
            names=tuple(name for name in self.names if name in kept),
            runs=tuple(run for run in self.runs if run.variant in kept),
            partial=tuple(run for run in self.partial if run.variant in kept),
            unfinished=tuple(
                each for each in self.unfinished if each.rpartition(", seed ")[0] not in left
            ),
        )

    def against(self, baseline: str) -> "ComparedRuns":
        """Return the comparison with another baseline.

        Raises:
            WakefulError: it is none of the variants that have finished.
        """
        self._check_finished("baseline", baseline)
        return replace(self, names=(baseline, *(n for n in self.names if n != baseline)))

    def _check_finished(self, option: str, name: str) -> None:
        if name not in self.variants:
            raise WakefulError(
                f"{option} = {name!r} is none of the variants with a finished run: "
                f"{', '.join(self.variants)}{nearest(name, self.variants)}"
            )

    @property
    def drawn(self) -> tuple[str, ...]:
        """The variants that have a training curve."""
        begun = {*self.variants, *(run.variant for run in self.partial)}
        return tuple(name for name in self.names if name in begun)

    def of(self, variant: str) -> list[TrainedRun]:
        """Return a variant's finished runs by seed."""
        return _by_seed(variant, self.runs)

    def curves(self, variant: str) -> list[TrainedRun]:
        """Return the runs to draw: the finished ones, or else those under way, by seed."""
        return self.of(variant) or _by_seed(variant, self.partial)

    def paired_over(self, variant: str) -> str:
        """Unit that a variant's figures are means over: "seeds" where two or more are compared."""
        return "seeds" if len(self.compared(variant)) > 1 else "windows"

    def compared(self, variant: str) -> list[TrainedRun]:
        """Return the runs that a variant's figures are of: those with a baseline's of their seed.

        A variant that shares no seed with the baseline is shown by all that it has.
        """
        return [run for run, _ in self.pairs(variant)] or self.of(variant)

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """Every seed that some variant has finished."""
        return tuple(sorted({run.seed for run in self.runs}))

    def missing(self, variant: str) -> list[int]:
        """Return the seeds that another variant has finished and this one has not."""
        there = {run.seed for run in self.of(variant)}
        return [seed for seed in self.seeds if seed not in there]

    def pairs(self, variant: str, runs: Sequence[TrainedRun] | None = None) -> Pairs:
        """Return (run, finished baseline run) for each seed that both have; `runs` are the
        variant's, its finished ones where not given.
        """
        base = {run.seed: run for run in self.of(self.baseline)}
        runs = self.of(variant) if runs is None else runs
        return [(run, base[run.seed]) for run in runs if run.seed in base]


def _by_seed(variant: str, runs: Sequence[TrainedRun]) -> list[TrainedRun]:
    return sorted((run for run in runs if run.variant == variant), key=lambda run: run.seed)


def read_comparison(source: str | Path | Sequence[str | Path], baseline: str = "") -> ComparedRuns:
    """Read a comparison folder, one run, or several runs.

    The variant `baseline` is the one that differences are taken from; empty is the folder's own, or
    the first of several runs.

    Runs that are not finished are named in `unfinished` and stay out of every table; those that
    have begun are in `partial`, for the training curves. The baseline must have finished.

    Raises:
        WakefulError: a run is damaged, or two cannot be compared: other text, another tokenizer,
            other validation windows.
    """
    if isinstance(source, str | Path):
        header = Run.open(source).header
        if header.kind == "compare":
            found = _comparison_folder(Path(source), header, baseline or header.baseline)
            return found.against(baseline) if baseline else found
        source = [source]
    runs: list[TrainedRun] = []
    partial: list[TrainedRun] = []
    for path in source:
        # A finished baseline is what all else is measured by; without it the error says so.
        done = not runs or is_done(Path(path))
        (runs if done else partial).append(read_run(path, done=done))
    apart = _called_apart([*runs, *partial])
    runs, partial = apart[: len(runs)], apart[len(runs) :]
    found = _checked(
        ComparedRuns(
            Path(source[0]).name,
            names=tuple(dict.fromkeys(run.variant for run in apart)),
            runs=tuple(runs),
            unfinished=tuple(f"{run.variant}, seed {run.seed}" for run in partial),
            partial=tuple(partial),
        )
    )
    return found.against(baseline) if baseline else found


def _called_apart(runs: Sequence[TrainedRun]) -> list[TrainedRun]:
    """Call runs by their paths too where those of one name are not seeds of one variant.

    Two have one seed, as those of a preset do, or other configurations.
    """
    paths = [run.path.resolve() for run in runs]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise WakefulError(f"{runs[number].path} is named twice: name each run once")
    counts = Counter((run.variant, run.seed) for run in runs)
    alike = {variant for (variant, _), count in counts.items() if count > 1}
    alike |= {run.variant for run, _, _ in _odd_ones(runs)}
    return [
        replace(run, variant=f"{run.variant} ({run.path})") if run.variant in alike else run
        for run in runs
    ]


def _odd_ones(runs: Sequence[TrainedRun]) -> list[tuple[TrainedRun, TrainedRun, str]]:
    """Return each run that differs from its variant's first one, with that one and the fields."""
    of_variant: dict[str, list[TrainedRun]] = defaultdict(list)
    for run in runs:
        of_variant[run.variant].append(run)
    found: list[tuple[TrainedRun, TrainedRun, str]] = []
    for first, *others in of_variant.values():
        for run in others:
            odd = config_differences(first.config, run.config).keys() - _OF_ONE_VARIANT
            found += [(run, first, ", ".join(sorted(odd)))] if odd else []
    return found


def _comparison_folder(path: Path, header: Header, baseline: str) -> ComparedRuns:
    for name in header.variants:
        if not _is_folder_name(name):
            raise WakefulError(f"{path / 'run.json'}: variants cannot hold {name!r}")
    for seed in header.seeds:
        if not 0 <= seed < 2**63:
            raise WakefulError(f"{path / 'run.json'}: seeds cannot hold {seed!r}")
    runs: list[TrainedRun] = []
    partial: list[TrainedRun] = []
    unfinished: list[str] = []
    for variant, seed in itertools.product(header.variants, header.seeds):
        place = path / variant / f"seed-{seed}"
        if is_done(place):
            runs.append(read_run(place, variant))
            continue
        unfinished.append(f"{variant}, seed {seed}")
        if (place / "data.json").is_file():
            partial.append(read_run(place, variant, done=False))
    for run, first, odd in _odd_ones([*runs, *partial]):
        raise WakefulError(
            f"{run.path} and {first.path} are not seeds of one variant: they differ in {odd}; move "
            "one out of the comparison, and give wakeful report the paths of both"
        )
    finished = {run.variant for run in runs}
    if baseline not in finished and baseline in (header.baseline, *header.variants):
        done = ", ".join(name for name in header.variants if name in finished)
        other = f", or choose one that has, with --baseline: {done}" if done else ""
        raise WakefulError(
            f"{path} has no finished run of its baseline {baseline!r}; go on with the command that "
            f"began it and --resume{other}"
        )
    names = (header.baseline, *(v for v in header.variants if v != header.baseline))
    return _checked(
        ComparedRuns(
            header.name, names, tuple(runs), unfinished=tuple(unfinished),
            partial=tuple(run for run in partial if not run.metrics.is_empty()),
            layouts=tuple(header.layouts),
        )
    )  # fmt: skip


def _is_folder_name(name: str) -> bool:
    return 0 < len(name.encode()) < 256 and name not in (".", "..") and not set(name) & set("/\0")


def read_run(path: str | Path, variant: str = "", *, done: bool = True) -> TrainedRun:
    """Read a training run that is `done`, or one under way: of its summary there is only the data
    it reads.

    Raises:
        WakefulError: a file of it is missing, damaged or without what reports read.
    """
    run = Run.open(path)
    summary = run.read(Summary, "summary.json") if done else None
    validation = pl.DataFrame(schema=VALIDATION)
    if done:
        validation = read_windows(run.path / "validation.parquet").sort("window")
    config, every, table = run.config, _trajectories(run), run.path / "metrics.parquet"
    metrics = read_frame(table, METRICS) if table.is_file() else run.logged(METRICS)
    return TrainedRun(
        path=run.path,
        variant=variant or config.name,
        seed=config.train.seed,
        config=config,
        environment=run.read(Environment, "environment.json"),
        data=summary.data if summary else run.read(DataFacts, "data.json"),
        done=summary,
        metrics=metrics,
        validation=validation,
        followed=_followed(run, every),
        heads=every.filter(
            pl.col("head").is_not_null() | pl.col("head").is_null().all().over("figure")
        ),
    )


def _trajectories(run: Run) -> pl.DataFrame:
    """Return what was followed of layers and heads: `step`, `figure`, `layer`, `head`, `value`."""
    figure = pl.concat_str("metric", "position", separator="_").alias("figure")
    variant, of_head = pl.col("variant"), pl.col("head").is_not_null()
    # The paper's value drain joins a layer's heads; each head's own is a variant beside it.
    found = block_outputs(run.trajectories()).filter(
        (variant == "paper") | ((variant == "per_head") & of_head)
    )
    return found.select("step", figure, "layer", "head", "value")


def _followed(run: Run, every: pl.DataFrame) -> pl.DataFrame:
    of_layers = every.filter(pl.col("head").is_null())
    frame = of_layers.group_by("step", "figure").agg(pl.col("value").mean()).sort("step")
    if frame.is_empty():
        return frame
    excess = [
        (row.step, "excess_loss", row.excess_loss)
        for row in rows(run, Evaluation)
        if row.excess_loss is not None
    ]
    return frame.extend(pl.DataFrame(excess, schema=frame.schema, orient="row"))


def _checked(comparison: ComparedRuns) -> ComparedRuns:
    """Refuse runs whose losses cannot be paired."""
    first = comparison.runs[0]
    for run in (*comparison.runs[1:], *comparison.partial):
        if odd := _difference(run, first):
            raise WakefulError(f"{run.path} and {first.path} cannot be compared: their {odd}")
    return comparison


def _difference(run: TrainedRun, first: TrainedRun) -> str:
    """Return in what two runs differ whose losses cannot be paired; "" where they can be."""
    for key in ("corpus_sha256", "tokenizer", "validation_tokens"):
        if getattr(run.data, key) != getattr(first.data, key):
            return f"{key} differs; train both on the same data"
    ours, theirs = (max(1, each.config.model.relaxed_prefix) for each in (run, first))
    if ours != theirs:
        return (
            f"model.relaxed_prefix differs, {ours} and {theirs}, and losses leave out the targets "
            "inside it; report each alone"
        )
    windows, others = (each.validation.select("window", "tokens") for each in (run, first))
    if run.done and not windows.equals(others):
        return "validation windows differ (train.length must be the same)"
    return ""
