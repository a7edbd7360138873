"""The runs that an exhibit takes: trained or taken, inherited, looked at and asked."""

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
from wakeful.inheritance.outcome import read_inheritance
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
from wakeful_papers.exhibits.exhibit import ALIKE
from wakeful_papers.exhibits.figures import (
    SeenRow,
    answer_name,
    seen_of_arm,
    seen_of_run,
    train_curve,
)
from wakeful_papers.exhibits.plan import Job, Plan, heirs_table, short
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
"""The probe of an exhibit that needs a backward pass."""
OF_DECODER: dict[str, Callable[[Decoder], Probe]] = {
    "generated": GeneratedValues,
    "weights": LargestWeights,
}
"""Probes that read a trained model's own parts beside what passes through them."""
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
"""By the name that exhibits write."""


@dataclass(frozen=True)
class _Figures:
    """What a model came to, by the figures' names."""

    figures: dict[str, float]


def carried_out(
    plan: Plan, runs: Path, place: Path, display: DisplayFactory, overflowed: Mapping[Path, str]
) -> tuple[Results, RunFacts]:
    """Train, or take, every run; look at every model; return what they came to.

    A run that diverges is left out and named, unless it is of the baseline; `overflowed` has those
    that did so before, by their folders.
    """
    seen: dict[RowKey, SeenRow] = {}
    facts: RunFacts | None = None
    trained: dict[DataConfig, TrainedRun] = {}
    diverged: list[str] = []
    for seed in plan.seeds:
        for job in plan.jobs:
            reference = plan.reference_of(job.group)
            if reference is None:
                path = runs / job.folder / f"seed-{seed}"
                try:
                    if path in overflowed:
                        raise Diverged(overflowed[path])
                    train_job(job, seed, path, display)
                except Diverged as fault:
                    if job.row == plan.exhibit.table.baseline:
                        raise  # every claim of the group stands against it
                    diverged.append(f"{f'{job.group} {job.row}'.strip()}, seed {seed}: {fault}")
                    continue
                read = read_run(path, job.row)
                _check_text(read, trained.setdefault(read.config.data, read))
                facts = facts or RunFacts.of(read)
                layers = _looked_at(path, f"{job.folder}-{seed}", job.row, plan, place, display)
                answers = _asked(str(path), f"{job.folder}-{seed}", plan, place, display)
                seen[job.group, job.row, seed] = seen_of_run(read).besides(layers, answers)
                source = str(path)
            else:
                source = reference.source
            if plan.heirs_of(job):
                found, last = _inherited(plan, job, seed, source, runs, place, display)
                seen |= found
                facts = facts or RunFacts.of(read_run(last, job.row))
    seen |= _existing(plan, runs, place, display)
    places = {key: group.at for key, group in plan.exhibit.groups.items() if group.at is not None}
    facts = facts or RunFacts.of_reading(plan, environment(choose_device(plan.config.train.device)))
    return Results(plan.exhibit.table.baseline, places, seen, tuple(diverged)), facts


def _existing(
    plan: Plan, runs: Path, place: Path, display: DisplayFactory
) -> dict[RowKey, SeenRow]:
    """Look at the models that are not trained here, each seed at a stretch of the text."""
    seen: dict[RowKey, SeenRow] = {}
    for row, given in plan.existing.items():
        with display(row) as show:
            found = _read_over(given.source, plan, runs, show)
        for seed, (figures, layers) in zip(plan.seeds, found, strict=True):
            answers = _asked(given.source, _named(given.source), plan, place, display)
            seen["", row, seed] = SeenRow(figures).besides(layers, answers)
    return seen


def _read_over(
    source: str, plan: Plan, runs: Path, show: Display
) -> list[tuple[dict[str, float], pl.DataFrame]]:
    """Return a model's figures and layers on each stretch of the text.

    They are kept among the runs, for every exhibit that reads the same.
    """
    size, count, text = plan.exhibit.looks, len(plan.seeds), plan.config.data.source
    words = None if text.startswith("hf:") else open_evaluation_data(text, size * count * LENGTH)
    read = "" if words is None else words.sha256
    probes = [each for each in plan.exhibit.probes if each in PROBES]
    facts = [source, text, read, size, plan.exhibit.schemes, LENGTH, *_state(source), *probes]
    folder = runs / f"{short(source)}-looks-{json_digest(facts)[:12]}"
    frames = [folder / f"stretch-{n}.parquet" for n in range(count)]
    records = [folder / f"stretch-{n}.json" for n in range(count)]
    if not all(file.is_file() for file in (*frames, *records)):
        show.note(f"looking at {source}")
        transformers.logging.disable_progress_bar()
        model = load(source, device=plan.config.train.device)
        words = words or open_evaluation_data(text, size * count * LENGTH)
        length = min(LENGTH, model.context)
        whole = words.sequences(
            model, length=length, num_sequences=count * size, bos=model.starts_with_bos()
        )

        folder.mkdir(parents=True, exist_ok=True)
        for n in range(count):
            if not (frames[n].is_file() and records[n].is_file()):
                part = whole[n * size : (n + 1) * size]
                more = [PROBES[each]() for each in probes]
                rows, figures = look(model, part, plan.exhibit.schemes, more)
                Run(folder).write_frame(frames[n].name, rows)
                Run(folder).write_json(records[n].name, {"figures": figures})
            show.count("stretches of the text", n + 1, count)
    return [
        (read_record(_Figures, record).figures, read_frame(frame, SCHEMA))
        for record, frame in zip(records, frames, strict=True)
    ]


def look(
    model: Model,
    sequences: Sequence[Sequence[int]],
    schemes: Sequence[str],
    more: Iterable[Probe],
) -> tuple[Frame, dict[str, float]]:
    """Run a model over sequences, and again with its linear layers quantized by each scheme.

    Return the rows of every metric, those of `more` probes too, and the figures: `loss` in nats a
    token, `perplexity` and `parameters`, and of a scheme `increase_SCHEME` of the perplexity and
    `damage_SCHEME` of the loss.
    """
    seen = diagnose_model(model, sequences, extra_probes=more)
    figures = {
        "loss": seen.loss,
        "perplexity": perplexity(seen.loss),
        "parameters": float(sum(weight.numel() for weight in model.module.parameters())),
    }
    if schemes:
        rows = [torch.tensor([list(each)], device=model.device) for each in sequences]
        forms = {scheme: quantize_module(model.module, scheme) for scheme in schemes}
        found = measure_damage(model.name, model.module, forms, rows)
        for scheme in schemes:
            figures[f"increase_{scheme}"] = found.perplexity_increase(scheme)[0]
            figures[f"damage_{scheme}"] = found.loss_increase(scheme)[0]
    return seen.rows, figures


def _state(source: str) -> list[tuple[str, int, int]]:
    """Return which weights a folder or file holds, by size and time; nothing of a name on the hub.

    A run that is trained further has other figures under the same path.
    """
    place = Path(source)
    files = [place] if place.is_file() else [*place.rglob("*.safetensors"), *place.rglob("*.gguf")]
    return [
        (file.relative_to(place).as_posix(), file.stat().st_size, file.stat().st_mtime_ns)
        for file in sorted(files)
    ]


def _named(source: str) -> str:
    """Return what the answers of a model are called: those of other weights have another name."""
    state = _state(source)
    return f"{short(source)}-{json_digest(state)[:6]}" if state else short(source)


def train_job(job: Job, seed: int, path: Path, display: DisplayFactory) -> None:
    """Train what is missing of a run of the job."""
    if is_done(path):
        return
    begun = (path / "run.json").is_file()
    try:
        with display(f"{job.group} {job.row}, seed {seed}".strip()) as show:
            train_run(job.seeded(seed), path, resume=begun, show=show)
    except Interrupted as stopped:
        raise Interrupted(
            f"{job.row}, seed {seed}: {stopped.what}", "the same command goes on"
        ) from None


def _check_text(run: TrainedRun, other: TrainedRun) -> None:
    """Raise `WakefulError` where runs that name the same text were trained on different ones."""
    if run.data.without_source != other.data.without_source:
        raise WakefulError(
            f"{other.path} and {run.path} were trained on different texts, both called "
            f"{run.config.data.source!r}: remove the one whose text is gone, or keep the runs of "
            "this text in another folder (--runs)"
        )


def _inherited(
    plan: Plan, job: Job, seed: int, source: str, runs: Path, place: Path, display: DisplayFactory
) -> tuple[dict[RowKey, SeenRow], Path]:
    """Return what heirs of a reference came to, doing what is missing, and the last heir's run."""
    path = runs / plan.heirs_folder(job, seed) / f"seed-{seed}"
    arms = inherit_with_baselines(
        source, heirs_table(plan, job, seed), plan.heirs[job.group].baseline, path, display
    )
    summary, _ = read_inheritance(path)
    found: dict[RowKey, SeenRow] = {}
    if plan.reference_of(job.group) is not None:
        answers = _asked(source, f"{plan.reference_name(job)}-reference", plan, place, display)
        figures = {"loss": summary.reference.loss}
        figures["parameters"] = float(summary.reference.parameters)
        found[job.group, "reference", seed] = SeenRow(figures).besides(None, answers)
    for arm in arms:
        row = "heir" if arm.arm == summary.final else arm.arm
        row = ALIKE["reference"] if row == "reference" else row
        last = path / arm.runs[-1]
        label = f"{path.parent.name}-{row}-{seed}"
        layers = _looked_at(last, label, row, plan, place, display)
        answers = _asked(str(last), label, plan, place, display)
        training = train_curve([read_run(path / stage) for stage in arm.runs])
        found[job.group, row, seed] = seen_of_arm(arm, training).besides(layers, answers)
    return found, path / summary.heir.runs[-1]


def _looked_at(
    path: Path, name: str, row: str, plan: Plan, place: Path, display: DisplayFactory
) -> pl.DataFrame | None:
    """Return what probes see in the layers of a trained model, kept in the exhibit's folder."""
    looked, windows = plan.exhibit, plan.exhibit.looks
    if not windows:
        return None
    file = place / "layers" / f"{name}.parquet"
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
            more = [PROBES[each]() for each in looked.probes if each in PROBES]
            more += [OF_DECODER[each](decoder) for each in looked.probes if each in OF_DECODER]
            ranks = "ranks" in looked.probes
            frames = [diagnose_windows(decoder, tests, windows, [Importance(), *more], ranks=False)]
            if GRADIENTS in looked.probes:
                frames.append(query_key_gradients(decoder, window_rows(tests, windows)))
            for share in looked.lengths:
                length = max(2, round(share * config.train.length))
                train = dataclasses.replace(config.train, length=length)
                shorter = data.windows(dataclasses.replace(config, train=train))
                found = diagnose_windows(decoder, shorter, windows, ranks=ranks)
                frames.append(_marked(found, f"{share:g}"))
            if plan.elsewhere:
                words = open_evaluation_data(plan.elsewhere, windows * config.train.length)
                sequences = words.sequences(
                    model,
                    length=config.train.length,
                    num_sequences=windows,
                    bos=model.starts_with_bos(),
                )
                frames.append(_marked(diagnose_model(model, sequences).rows, "elsewhere"))
            frame = pl.concat(frames)
        file.parent.mkdir(exist_ok=True)
        Run(file.parent).write_frame(file.name, frame)
    return read_frame(file, SCHEMA)


def _marked(rows: Frame, where: str) -> Frame:
    """Return rows with each metric as METRIC@WHERE."""
    return rows.with_columns(metric=pl.format("{}@{}", "metric", pl.lit(where)))


def _asked(
    source: str, name: str, plan: Plan, place: Path, display: DisplayFactory
) -> dict[str, float]:
    """Return a model's figures on the exhibit's tasks, kept in the exhibit's folder."""
    if not plan.tasks:
        return {}
    file = place / "answers" / f"{name}.json"
    if not file.is_file():
        figures: dict[str, float] = {}
        for shots, tasks in by_shots(plan.tasks).items():
            scores = evaluate(source, tasks=tasks, display=display).scores
            figures |= {answer_name(one.task, one.metric, shots): one.figure for one in scores}
            figures |= {
                answer_name("average", metric, shots): mean
                for metric, mean in _averages(scores).items()
            }
        file.parent.mkdir(exist_ok=True)
        Run(file.parent).write_json(file.name, {"figures": figures})
    return read_record(_Figures, file).figures


def _averages(scores: Sequence[Score]) -> dict[str, float]:
    """Return the mean over tasks of each metric that two or more tasks have, each task alike.

    A group counts once, without its parts; perplexities are not averaged.
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


def by_shots(tasks: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """Return tasks, TASK or TASK@SHOTS, by their shots; those without any have 0."""
    found: dict[int, tuple[str, ...]] = {}
    for each in tasks:
        _, shots = with_shots(each)
        found[shots or 0] = (*found.get(shots or 0, ()), each)
    return found
