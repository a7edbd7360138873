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
from wakeful.errors import WakefulError, did_you_mean
from wakeful.probes.base import block_outputs
from wakeful.runs.records import DataFacts, RunSummary, ValidationRow, logged_rows
from wakeful.runs.run import METRICS, Environment, Header, Run, is_done, read_frame, read_windows

_OF_ONE_VARIANT = frozenset({
    "name", "data.source", "data.tokenizer", "train.seed", "train.device", "train.log_every",
    "train.checkpoint_every", "train.keep_checkpoints", "train.tensorboard", "train.wandb",
})  # fmt: skip
"""Fields in which seeds of one variant may differ; of data and tokenizer the content counts."""


@dataclass(frozen=True)
class TrainedRun:
    """Files of a finished run."""

    path: Path
    variant: str
    seed: int
    config: Config
    environment: Environment
    data: DataFacts
    summary: RunSummary
    metrics: pl.DataFrame
    validation: pl.DataFrame
    """One row per validation window: window, loss (mean nats per token), tokens."""
    followed: pl.DataFrame
    """Figures over steps, `step`, `figure` and `value`: means over layers, and a task's excess
    loss; no rows where the configuration follows none."""


Pairs = list[tuple[TrainedRun, TrainedRun]]


@dataclass(frozen=True)
class ComparedRuns:
    """Finished runs of several variants, the first of which is the baseline."""

    name: str
    names: tuple[str, ...]
    """Every planned variant, in an order that does not change as runs finish."""
    runs: tuple[TrainedRun, ...]
    unfinished: tuple[str, ...]
    """Labels of the runs that are not in the tables."""
    layouts: tuple[str, ...] = ()
    """Layouts of its page, by their names (`reports.layouts`)."""

    @cached_property
    def variants(self) -> tuple[str, ...]:
        """Variants with a finished run."""
        finished = {run.variant for run in self.runs}
        return tuple(name for name in self.names if name in finished)

    @property
    def baseline(self) -> str:
        """The variant that differences are taken from."""
        return self.variants[0]

    def select_variants(self, variants: Sequence[str]) -> "ComparedRuns":
        """Return the comparison of the baseline with these variants alone.

        Raises:
            WakefulError: a name is not that of a variant with a finished run.
        """
        for name in variants:
            self._check_finished("only", name)
        included = {self.baseline, *variants}
        return replace(
            self,
            names=tuple(name for name in self.names if name in included),
            runs=tuple(run for run in self.runs if run.variant in included),
            unfinished=tuple(  # labels such as "variant, seed 3"
                label for label in self.unfinished if label.rpartition(", seed ")[0] in included
            ),
        )

    def with_baseline(self, baseline: str) -> "ComparedRuns":
        """Return the comparison with another baseline, which becomes the first of its names.

        Raises:
            WakefulError: `baseline` is not the name of a variant with a finished run.
        """
        self._check_finished("baseline", baseline)
        return replace(self, names=(baseline, *(n for n in self.names if n != baseline)))

    def _check_finished(self, option: str, name: str) -> None:
        """Raise `WakefulError` unless `name` is a variant with a finished run; the message calls it
        the value of `option`.
        """
        if name not in self.variants:
            raise WakefulError(
                f"{option} = {name!r} is none of the variants with a finished run: "
                f"{', '.join(self.variants)}{did_you_mean(name, self.variants)}"
            )

    def of(self, variant: str) -> list[TrainedRun]:
        """Return a variant's finished runs by seed."""
        runs = (run for run in self.runs if run.variant == variant)
        return sorted(runs, key=lambda run: run.seed)

    def paired_over(self, variant: str) -> str:
        """Return the unit that errors of a variant's figures are over: "seeds" if two or more of
        its seeds are compared, otherwise "windows", those of the validation text.
        """
        return "seeds" if len(self.compared(variant)) > 1 else "windows"

    def compared(self, variant: str) -> list[TrainedRun]:
        """Return a variant's runs whose seed the baseline has too, or all if there are none."""
        return [run for run, _ in self.pairs(variant)] or self.of(variant)

    @cached_property
    def seeds(self) -> tuple[int, ...]:
        """Every seed that some variant has finished."""
        return tuple(sorted({run.seed for run in self.runs}))

    def pairs(self, variant: str) -> Pairs:
        """Return (run, baseline run) for each seed that both have finished."""
        baseline_runs = {run.seed: run for run in self.of(self.baseline)}
        return [
            (run, baseline_runs[run.seed]) for run in self.of(variant) if run.seed in baseline_runs
        ]


def read_comparison(source: str | Path | Sequence[str | Path], baseline: str = "") -> ComparedRuns:
    """Read finished runs to compare: a comparison's folder, one run, or several runs.

    Differences are to the variant `baseline`. If that is empty, the baseline is the folder's own,
    or the first of several runs.

    A comparison's unfinished runs are listed in `unfinished`, but its baseline must have a finished
    run. Runs that are named one by one must all have finished.

    Raises:
        WakefulError: a run is damaged or missing, or two runs cannot be compared: their texts,
            tokenizers or validation windows differ.
    """
    if isinstance(source, str | Path):
        header = Run.open(source).header
        if header.kind == "compare":
            comparison = _read_comparison(Path(source), header, baseline or header.baseline)
            return comparison.with_baseline(baseline) if baseline else comparison
        source = [source]
    runs = _with_unique_names([read_run(path) for path in source])
    names = tuple(dict.fromkeys(run.variant for run in runs))
    comparison = _check_paired(ComparedRuns(Path(source[0]).name, names, tuple(runs), ()))
    return comparison.with_baseline(baseline) if baseline else comparison


def _with_unique_names(runs: Sequence[TrainedRun]) -> list[TrainedRun]:
    """Return the runs, with other variant names if these are ambiguous: only seeds of one variant
    may share a name.

    If two runs of a name have the same seed, or their configurations differ in more than the seed,
    the path of each run of that name is added to it.

    Raises:
        WakefulError: a path is given twice.
    """
    paths = [run.path.resolve() for run in runs]
    for number, path in enumerate(paths):
        if path in paths[:number]:
            raise WakefulError(f"{runs[number].path} is named twice: name each run once")
    counts = Counter((run.variant, run.seed) for run in runs)
    ambiguous = {variant for (variant, _), count in counts.items() if count > 1}
    ambiguous |= {run.variant for run, _, _ in _differing_runs(runs)}
    return [
        replace(run, variant=f"{run.variant} ({run.path})") if run.variant in ambiguous else run
        for run in runs
    ]


def _differing_runs(runs: Sequence[TrainedRun]) -> list[tuple[TrainedRun, TrainedRun, str]]:
    """Return (run, first run of its variant, differing fields as text) for each run whose
    configuration differs from that of the first run of its variant.

    Fields in which seeds of one variant may differ (`_OF_ONE_VARIANT`) do not count.
    """
    runs_by_variant: dict[str, list[TrainedRun]] = defaultdict(list)
    for run in runs:
        runs_by_variant[run.variant].append(run)
    differences: list[tuple[TrainedRun, TrainedRun, str]] = []
    for first, *rest in runs_by_variant.values():
        for run in rest:
            fields = config_differences(first.config, run.config).keys() - _OF_ONE_VARIANT
            if fields:
                differences.append((run, first, ", ".join(sorted(fields))))
    return differences


def _read_comparison(path: Path, header: Header, baseline: str) -> ComparedRuns:
    """Read the finished runs of a comparison's folder, and list the labels of unfinished ones.

    `header`, of the folder's run.json, names variants, seeds and the baseline of what is returned.
    `baseline`, the one that the user wants, is only checked: if it is a variant, it must have a
    finished run.

    Raises:
        WakefulError: `baseline` has no finished run, run.json is damaged, or runs cannot be
            compared.
    """
    for name in header.variants:
        if not _is_folder_name(name):  # it could lead out of the comparison's folder
            raise WakefulError(f"{path / 'run.json'}: variants cannot hold {name!r}")
    for seed in header.seeds:
        if not 0 <= seed < 2**63:
            raise WakefulError(f"{path / 'run.json'}: seeds cannot hold {seed!r}")
    runs: list[TrainedRun] = []
    unfinished: list[str] = []
    for variant, seed in itertools.product(header.variants, header.seeds):
        folder = path / variant / f"seed-{seed}"
        if is_done(folder):
            runs.append(read_run(folder, variant))
        else:
            unfinished.append(f"{variant}, seed {seed}")
    for run, first, fields in _differing_runs(runs):  # the first one is reported
        raise WakefulError(
            f"{run.path} and {first.path} are not seeds of one variant: they differ in {fields}; "
            "move one out of the comparison, and give wakeful report the paths of both"
        )
    finished = {run.variant for run in runs}
    # A name that is no variant's is left to `with_baseline`, whose message lists the variants.
    if baseline not in finished and baseline in (header.baseline, *header.variants):
        choices = ", ".join(name for name in header.variants if name in finished)
        choice = f", or choose one that has, with --baseline: {choices}" if choices else ""
        raise WakefulError(
            f"{path} has no finished run of its baseline {baseline!r}; go on with the command that "
            f"began it and --resume{choice}"
        )
    names = (header.baseline, *(name for name in header.variants if name != header.baseline))
    return _check_paired(
        ComparedRuns(
            header.name, names, tuple(runs), tuple(unfinished), layouts=tuple(header.layouts)
        )
    )  # fmt: skip


def _is_folder_name(name: str) -> bool:
    return 0 < len(name.encode()) < 256 and name not in (".", "..") and not set(name) & set("/\0")


def read_run(path: str | Path, variant: str = "") -> TrainedRun:
    """Read a finished training run; `variant` is its name in the comparison, by default the name in
    its configuration.

    Raises:
        WakefulError: one of its files is missing, damaged or incomplete.
    """
    run = Run.open(path)
    summary, config = run.read(RunSummary, "summary.json"), run.config
    return TrainedRun(
        path=run.path,
        variant=variant or config.name,
        seed=config.train.seed,
        config=config,
        environment=run.read(Environment, "environment.json"),
        data=summary.data,
        summary=summary,
        metrics=read_frame(run.path / "metrics.parquet", METRICS),
        validation=read_windows(run.path / "validation.parquet").sort("window"),
        followed=_read_followed(run),
    )


def _read_followed(run: Run) -> pl.DataFrame:
    """Return a run's figures over steps, in the columns `step`, `figure` and `value`.

    A figure is a metric's mean over layers, and its name is "metric_position". A synthetic task has
    "excess_loss" too: the validation loss minus that of the task's own distribution. There are no
    rows if the run logged no metrics of layers.
    """
    figure = pl.concat_str("metric", "position", separator="_").alias("figure")
    is_layer_row = pl.col("head").is_null()  # other rows are of one head
    layer_rows = block_outputs(run.trajectories()).filter(is_layer_row, variant="paper")
    means = layer_rows.group_by("step", figure).agg(pl.col("value").mean())
    frame = means.sort("step", "figure")
    if frame.is_empty():
        return frame
    excess = [
        (row.step, "excess_loss", row.excess_loss)
        for row in logged_rows(run, ValidationRow)
        if row.excess_loss is not None
    ]
    return frame.extend(pl.DataFrame(excess, schema=frame.schema, orient="row"))


def _check_paired(comparison: ComparedRuns) -> ComparedRuns:
    """Return the comparison itself; raise `WakefulError` if losses of its runs cannot be paired."""
    first = comparison.runs[0]
    for run in comparison.runs[1:]:
        if difference := _unpaired_difference(run, first):
            raise WakefulError(
                f"{run.path} and {first.path} cannot be compared: their {difference}"
            )
    return comparison


def _unpaired_difference(run: TrainedRun, first: TrainedRun) -> str:
    """Return why the losses of two runs cannot be paired, with the remedy, as the end of "their …":
    their data or validation windows differ. "" if they can be paired.
    """
    for key in ("corpus_sha256", "tokenizer", "validation_tokens"):
        if getattr(run.data, key) != getattr(first.data, key):
            return f"{key} differs; train both on the same data"
    windows = run.validation.select("window", "tokens")
    first_windows = first.validation.select("window", "tokens")
    if not windows.equals(first_windows):
        return "validation windows differ (train.length must be the same)"
    return ""
