"""The runs of a plan: training and inheritance, probes of layers, and evaluation on tasks."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import polars as pl
import torch
import transformers

from wakeful.config.reading import LENGTH
from wakeful.config.schema import DataConfig
from wakeful.data.preparing import load_data
from wakeful.device import choose_device
from wakeful.diagnosis.measure import diagnose_model
from wakeful.digests import json_digest
from wakeful.errors import Diverged, Interrupted, WakefulError
from wakeful.estimates import perplexity
from wakeful.evaluation.options import with_shots
from wakeful.evaluation.tool import evaluate
from wakeful.inheritance.outcome import Arm, read_inheritance
from wakeful.loading.load import load, read_decoder
from wakeful.loading.model import Model
from wakeful.loading.reading import open_evaluation_data
from wakeful.model.decoder import Decoder
from wakeful.probes.attention import Importance
from wakeful.probes.base import SCHEMA, Frame, Probe
from wakeful.probes.rank import Ranks
from wakeful.probes.watch import unseen_reason
from wakeful.quantization.convert import quantize_module
from wakeful.quantization.measure import measure_damage
from wakeful.runs.records import check_same_data
from wakeful.runs.run import Run, environment, is_done, read_frame, read_record
from wakeful.scores import Score
from wakeful.terminal.display import Display, DisplayFactory
from wakeful.training.compared import TrainedRun, read_run
from wakeful.training.loop import train_run
from wakeful.training.watching import diagnose_windows, window_rows
from wakeful_papers.exhibits.derived import Results, RowKey
from wakeful_papers.exhibits.exhibit import EQUAL_TRAINING
from wakeful_papers.exhibits.figures import (
    Measurement,
    measure_arm,
    measure_run,
    task_figure_name,
    train_curve,
)
from wakeful_papers.exhibits.plan import Job, Plan, file_label, heirs_table
from wakeful_papers.heirs import inherit_with_baselines
from wakeful_papers.probes.channels import ChannelOverlap, LargestWeights
from wakeful_papers.probes.generated import GeneratedValues
from wakeful_papers.probes.gradients import query_key_gradients
from wakeful_papers.probes.mappings import Mappings
from wakeful_papers.probes.pictures import AttentionPictures, HiddenPicture, MeanAttention
from wakeful_papers.probes.positions import Positions, Spectrum
from wakeful_papers.probes.rotated import RotatedShape
from wakeful_papers.reports.reproduction import RunFacts

GRADIENTS = "gradients"
"""Name of the probe that needs a backward pass."""
DECODER_PROBES: dict[str, Callable[[Decoder], Probe]] = {
    "generated": GeneratedValues,
    "weights": LargestWeights,
}
"""Probes that also read a trained model's own parameters and modules."""
PROBES: dict[str, Callable[[], Probe]] = {
    "attention_picture": partial(AttentionPictures, size=32),
    "channel_overlap": ChannelOverlap,
    "hidden_picture": partial(HiddenPicture, tokens=32, bins=192),
    "mappings": Mappings,
    "mean_attention": MeanAttention,
    "positions": Positions,
    "ranks": Ranks,
    "spectrum": Spectrum,
    "turned": RotatedShape,
}
"""Probes of any model's layers, by the name that exhibits use."""


@dataclass(frozen=True)
class _Figures:
    """A model's figures by name, as a JSON file has them."""

    figures: dict[str, float]


def run_plan(
    plan: Plan, runs: Path, folder: Path, display: DisplayFactory, divergences: Mapping[Path, str]
) -> tuple[Results, RunFacts]:
    """Train every run that is missing, measure every model, and return the results and facts.

    `folder` is the exhibit's. The results name runs that diverged, also earlier (`divergences`, the
    messages by folder), and lack their figures. The baseline's raises `Diverged`.
    """
    rows: dict[RowKey, Measurement] = {}
    facts: RunFacts | None = None
    first_runs: dict[DataConfig, TrainedRun] = {}
    diverged: list[str] = []
    for seed in plan.seeds:
        for job in plan.jobs:
            reference = plan.reference_of(job.group)
            if reference is None:
                path = runs / job.folder / f"seed-{seed}"
                try:
                    _check_divergence(path, divergences)
                    train_job(job, seed, path, display)
                except Diverged as error:
                    if job.row == plan.exhibit.table.baseline:
                        raise  # every claim of the group is compared with it
                    diverged.append(_divergence_text(job, job.row, seed, error))
                    continue
                run = read_run(path, job.row)
                _check_text(run, first_runs.setdefault(run.config.data, run))
                facts = facts or RunFacts.from_run(run)
                name = f"{job.folder}-{seed}"
                layers = _measure_layers(path, name, job.row, plan, folder, display)
                task_figures = _task_figures(str(path), name, plan, folder, display)
                rows[job.group, job.row, seed] = measure_run(run).with_probes(layers, task_figures)
                source = str(path)
            else:
                source = reference.source
            if plan.heirs_of(job):
                path = runs / plan.heirs_folder(job, seed) / f"seed-{seed}"
                table, names = heirs_table(plan, job, seed), plan.heirs[job.group].baseline
                try:
                    _check_divergence(path, divergences)
                    heirs = inherit_with_baselines(source, table, names, path, display)
                except Diverged as error:
                    diverged.append(_divergence_text(job, "heir", seed, error))
                    continue
                for arm, error in heirs.diverged.items():
                    diverged.append(_divergence_text(job, _arm_row(arm), seed, error))
                rows |= _measure_arms(plan, job, seed, source, path, heirs.arms, folder, display)
                heir = read_inheritance(path)[0].heir
                facts = facts or RunFacts.from_run(read_run(path / heir.runs[-1], job.row))
    rows |= _measure_existing(plan, runs, folder, display)
    axis_values = {k: g.at for k, g in plan.exhibit.groups.items() if g.at is not None}
    facts = facts or RunFacts.from_plan(plan, environment(choose_device(plan.config.train.device)))
    return Results(plan.exhibit.table.baseline, axis_values, rows, tuple(diverged)), facts


def _measure_existing(
    plan: Plan, runs: Path, folder: Path, display: DisplayFactory
) -> dict[RowKey, Measurement]:
    """Measure the models that are not trained here, the n-th seed on the text's n-th stretch."""
    rows: dict[RowKey, Measurement] = {}
    for row, model in plan.existing.items():
        with display(row) as show:
            stretches = _measure_stretches(model.source, plan, runs, show)
        for seed, (figures, layers) in zip(plan.seeds, stretches, strict=True):
            name = _answers_name(model.source)
            task_figures = _task_figures(model.source, name, plan, folder, display)
            rows["", row, seed] = Measurement(figures).with_probes(layers, task_figures)
    return rows


def _measure_stretches(
    source: str, plan: Plan, runs: Path, show: Display
) -> list[tuple[dict[str, float], pl.DataFrame]]:
    """Return a model's figures and its layers' rows for each stretch of the text.

    They are kept among the runs, for exhibits that measure the same on as many stretches.
    """
    size, count, text = plan.exhibit.looks, len(plan.seeds), plan.config.data.source
    data = None if text.startswith("hf:") else open_evaluation_data(text, size * count * LENGTH)
    digest = "" if data is None else data.sha256
    probes = [name for name in plan.exhibit.probes if name in PROBES]
    facts = [source, text, digest, size, plan.exhibit.schemes, LENGTH, *_weights(source), *probes]
    folder = runs / f"{file_label(source)}-looks-{json_digest(facts)[:12]}"
    frames = [folder / f"stretch-{n}.parquet" for n in range(count)]
    records = [folder / f"stretch-{n}.json" for n in range(count)]
    if not all(file.is_file() for file in (*frames, *records)):
        show.note(f"looking at {source}")
        transformers.logging.disable_progress_bar()
        model = load(source, device=plan.config.train.device)
        data = data or open_evaluation_data(text, size * count * LENGTH)
        length = min(LENGTH, model.context)
        sequences = data.sequences(
            model, length=length, num_sequences=count * size, bos=model.starts_with_bos()
        )
        folder.mkdir(parents=True, exist_ok=True)
        for n in range(count):
            if not (frames[n].is_file() and records[n].is_file()):
                stretch = sequences[n * size : (n + 1) * size]
                extra_probes = [PROBES[name]() for name in probes]
                rows, figures = measure_model(model, stretch, plan.exhibit.schemes, extra_probes)
                Run(folder).write_frame(frames[n].name, rows)
                Run(folder).write_json(records[n].name, {"figures": figures})
            show.count("stretches of the text", n + 1, count)
    return [
        (read_record(_Figures, record).figures, read_frame(frame, SCHEMA))
        for record, frame in zip(records, frames, strict=True)
    ]


def measure_model(
    model: Model, sequences: Sequence[Sequence[int]], schemes: Sequence[str],
    extra_probes: Iterable[Probe],
) -> tuple[Frame, dict[str, float]]:  # fmt: skip
    """Run a model over sequences, and again with its linear layers quantized by each scheme.

    Return the rows of all metrics, also of `extra_probes`, and the figures: `loss` in nats per
    token, `perplexity` and `parameters`, and for each scheme the `increase_SCHEME` of the
    perplexity and `damage_SCHEME` of the loss.
    """
    diagnosis = diagnose_model(model, sequences, extra_probes=extra_probes)
    figures = {
        "loss": diagnosis.loss,
        "perplexity": perplexity(diagnosis.loss),
        "parameters": float(sum(weight.numel() for weight in model.module.parameters())),
    }
    if schemes:
        rows = [torch.tensor([list(tokens)], device=model.device) for tokens in sequences]
        quantized = {scheme: quantize_module(model.module, scheme) for scheme in schemes}
        damage = measure_damage(model.name, model.module, quantized, rows)
        for scheme in schemes:
            figures[f"increase_{scheme}"] = damage.perplexity_increase(scheme)[0]
            figures[f"damage_{scheme}"] = damage.loss_increase(scheme)[0]
    return diagnosis.rows, figures


def _weights(source: str) -> list[tuple[str, int, int]]:
    """Return (name, size, time) of each weight file of a folder or file; none for a hub's name.

    They tell models apart that were at the same path, such as a run that was trained further.
    """
    path = Path(source)
    files = [path] if path.is_file() else [*path.rglob("*.safetensors"), *path.rglob("*.gguf")]
    return [
        (file.relative_to(path).as_posix(), file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(files)
    ]


def _answers_name(source: str) -> str:
    """Return the file name of a model's figures on tasks, which depends on its weight files."""
    files = _weights(source)
    return f"{file_label(source)}-{json_digest(files)[:6]}" if files else file_label(source)


def train_job(job: Job, seed: int, path: Path, display: DisplayFactory) -> None:
    """Train or resume a job's run with a seed, unless it is finished."""
    if is_done(path):
        return
    resume = (path / "run.json").is_file()
    try:
        with display(f"{job.group} {job.row}, seed {seed}".strip()) as show:
            train_run(job.config_with_seed(seed), path, resume=resume, show=show)
    except Interrupted as error:
        raise Interrupted(
            f"{job.row}, seed {seed}: {error.what}", "the same command goes on"
        ) from None


def _check_text(run: TrainedRun, first_run: TrainedRun, *, is_arm: bool = False) -> None:
    """Raise `WakefulError` if runs with the same name of a text were trained on different texts.

    Of an inheritance's arm, whose tokenizer is its reference's, the text alone is compared.
    """
    facts, first_facts = (
        each.data.corpus_sha256 if is_arm else each.data.without_source for each in (run, first_run)
    )
    if facts != first_facts:
        raise WakefulError(
            f"{first_run.path} and {run.path} were trained on different texts, both called "
            f"{first_run.config.data.source!r}: remove the one whose text is gone, or keep the "
            "runs of this text in another folder (--runs)"
        )


def _check_divergence(path: Path, divergences: Mapping[Path, str]) -> None:
    """Raise `Diverged` if the run in a folder diverged earlier."""
    if path in divergences:
        raise Diverged(divergences[path])


def _divergence_text(job: Job, row: str, seed: int, error: object) -> str:
    """Return the line of a page about a run that diverged, in a job's group."""
    return f"{f'{job.group} {row}'.strip()}, seed {seed}: {error}"


def _arm_row(arm: str) -> str:
    """Return the row of an inheritance's baseline."""
    return EQUAL_TRAINING["reference"] if arm == "reference" else arm


def _measure_arms(
    plan: Plan, job: Job, seed: int, source: str, path: Path, arms: Sequence[Arm], folder: Path,
    display: DisplayFactory,
) -> dict[RowKey, Measurement]:  # fmt: skip
    """Return the results of a reference's heirs and baselines, whose runs are in the folder `path`.

    A reference that is not trained here has its own result among them.
    """
    summary, _ = read_inheritance(path)
    rows: dict[RowKey, Measurement] = {}
    if plan.reference_of(job.group) is not None:
        name = f"{plan.reference_name(job)}-reference"
        task_figures = _task_figures(source, name, plan, folder, display)
        figures = {"loss": summary.reference.loss}
        figures["parameters"] = float(summary.reference.parameters)
        rows[job.group, "reference", seed] = Measurement(figures).with_probes(None, task_figures)
    first_run = read_run(source) if plan.reference_of(job.group) is None else None
    for arm in arms:
        stages = [read_run(path / stage) for stage in arm.runs]
        first_run = first_run or stages[0]
        for stage in stages:
            _check_text(stage, first_run, is_arm=True)
        row = "heir" if arm.arm == summary.final else _arm_row(arm.arm)
        last = path / arm.runs[-1]
        name = f"{path.parent.name}-{row}-{seed}"
        layers = _measure_layers(last, name, row, plan, folder, display)
        task_figures = _task_figures(str(last), name, plan, folder, display)
        measurement = measure_arm(arm, train_curve(stages))
        rows[job.group, row, seed] = measurement.with_probes(layers, task_figures)
    return rows


def _measure_layers(
    path: Path, name: str, row: str, plan: Plan, folder: Path, display: DisplayFactory
) -> pl.DataFrame | None:
    """Return the probes' rows of a trained model, kept in the exhibit's folder; None for none."""
    exhibit, windows = plan.exhibit, plan.exhibit.looks
    if not windows:
        return None
    file = folder / "layers" / f"{name}.parquet"
    if not file.is_file():
        with display(row) as show:
            show.note(f"looking at the layers of {row}")
            run = Run.open(path)
            config = run.config
            data = load_data(config.data)
            check_same_data(run, data)
            tests = data.windows(config)
            model = read_decoder(path, device=choose_device(config.train.device))
            decoder = model.decoder()
            if any(unseen_reason(n, block.attention) for n, block in enumerate(decoder.blocks)):
                show.note(f"{row}: no single matrix describes its attention, which is not shown")
                return None
            names = exhibit.probes
            probes: list[Probe] = [Importance(), *(PROBES[n]() for n in names if n in PROBES)]
            probes += [DECODER_PROBES[n](decoder) for n in names if n in DECODER_PROBES]
            frames = [diagnose_windows(decoder, tests, windows, probes, ranks=False)]
            if GRADIENTS in names:
                frames.append(query_key_gradients(decoder, window_rows(tests, windows)))
            for share in exhibit.lengths:
                length = max(2, round(share * config.train.length))
                train = dataclasses.replace(config.train, length=length)
                shorter = data.windows(dataclasses.replace(config, train=train))
                rows = diagnose_windows(decoder, shorter, windows, ranks="ranks" in names)
                frames.append(_tag_metrics(rows, f"{share:g}"))
            if plan.elsewhere:
                text = open_evaluation_data(plan.elsewhere, windows * config.train.length)
                bos, length = model.starts_with_bos(), config.train.length
                sequences = text.sequences(model, length=length, num_sequences=windows, bos=bos)
                frames.append(_tag_metrics(diagnose_model(model, sequences).rows, "elsewhere"))
            frame = pl.concat(frames)
        file.parent.mkdir(exist_ok=True)
        Run(file.parent).write_frame(file.name, frame)
    return read_frame(file, SCHEMA)


def _tag_metrics(rows: Frame, tag: str) -> Frame:
    """Return rows with each metric as METRIC@TAG."""
    return rows.with_columns(metric=pl.format("{}@{}", "metric", pl.lit(tag)))


def _task_figures(
    source: str, name: str, plan: Plan, folder: Path, display: DisplayFactory
) -> dict[str, float]:
    """Return a model's figures on the exhibit's tasks, kept in the exhibit's folder."""
    if not plan.tasks:
        return {}
    file = folder / "answers" / f"{name}.json"
    if not file.is_file():
        figures: dict[str, float] = {}
        for shots, tasks in group_by_shots(plan.tasks).items():
            scores = evaluate(source, tasks=tasks, display=display).scores
            figures |= {task_figure_name(s.task, s.metric, shots): s.figure for s in scores}
            figures |= {
                task_figure_name("average", metric, shots): mean
                for metric, mean in _averages(scores).items()
            }
        file.parent.mkdir(exist_ok=True)
        Run(file.parent).write_json(file.name, {"figures": figures})
    return read_record(_Figures, file).figures


def _averages(scores: Sequence[Score]) -> dict[str, float]:
    """Return the mean of each metric over tasks with equal weights, if two or more tasks have it.

    A group of tasks counts once. Perplexities and scores of one example are not averaged.
    """
    counted = [
        score for score in scores
        if not score.part_of and not score.exponential and len(score.keys) > 1
    ]  # fmt: skip
    means: dict[str, float] = {}
    for metric in dict.fromkeys(score.metric for score in counted):
        figures = [score.figure for score in counted if score.metric == metric]
        if len(figures) > 1:
            means[metric] = sum(figures) / len(figures)
    return means


def group_by_shots(tasks: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """Return tasks, TASK or TASK@SHOTS, by their number of shots, 0 for TASK."""
    groups: dict[int, tuple[str, ...]] = {}
    for task in tasks:
        _, shots = with_shots(task)
        groups[shots or 0] = (*groups.get(shots or 0, ()), task)
    return groups
