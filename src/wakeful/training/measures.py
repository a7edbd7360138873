"""What a run measures besides its training loss, on the way and at the end."""

import contextlib
import dataclasses
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import polars as pl
import torch
from jaxtyping import Int
from torch import Tensor

from wakeful.config.schema import Config
from wakeful.config.tables import to_table
from wakeful.data.order import Batches, ValidationWindows, documents_of
from wakeful.data.tokens import Data, Tokens
from wakeful.errors import Diverged
from wakeful.estimates import Estimate, finite, weighted_mean
from wakeful.model.decoder import IGNORED, Decoder
from wakeful.model.evaluating import evaluating
from wakeful.model.generate import generate
from wakeful.optim.orthoadam import OrthoAdam
from wakeful.probes.attention import BosMass, Entropy, Sinks, Values
from wakeful.probes.base import Event, Frame, Probe, mean_over_layers
from wakeful.probes.hidden import Outliers, Smoothing
from wakeful.probes.patterns import AttentionPictures
from wakeful.probes.rank import Ranks
from wakeful.probes.watch import watch
from wakeful.quant.convert import quantize
from wakeful.quant.measure import measure
from wakeful.runs import checkpoint
from wakeful.runs.run import TRAJECTORIES, Run
from wakeful.training.events import Write
from wakeful.training.parallel import Alone, Parallel
from wakeful.training.records import (
    AtTheEnd,
    Evaluation,
    HeadWeights,
    Parameters,
    Sample,
    Step,
    Summary,
    Validated,
    data_facts,
    record,
    rows,
)
from wakeful.training.setup import autocast, bos_of
from wakeful.world import ALONE, World


@torch.no_grad()
def evaluate(
    model: Decoder | Parallel,
    windows: ValidationWindows,
    autocast: contextlib.AbstractContextManager[object],
    *,
    cross_documents: bool = True,
) -> pl.DataFrame:
    """Return one row a validation window: `window`, `loss` (mean nats a token), `tokens`.

    Of a task also `optimal`, the loss of the task itself on the same targets; of a mixture
    `domain`.

    The whole set, in its order, each token but the first predicted once, from what its window holds
    before it: of its own document alone unless `cross_documents`. Where the first `relaxed_prefix`
    tokens of a window see each other, the targets among them are not counted.

    Every process calls it, and the batches are dealt out among them. In the last round processes
    without a batch of their own join in with the first, whose result they drop: a model in shares
    runs on all at once.
    """
    parallel = model if isinstance(model, Parallel) else Alone(model, ALONE)
    decoder, world = parallel.decoder, parallel.world
    device = decoder.embed.weight.device
    losses = torch.zeros(windows.num_windows, dtype=torch.float64)
    tokens = torch.zeros(windows.num_windows, dtype=torch.int64)
    best: Tensor | None = None
    end_of_text = windows.token_file.end_of_text

    def one_by_one(inputs: Tensor, targets: Tensor) -> Tensor:
        documents = None if cross_documents else documents_of(inputs, end_of_text)
        return decoder.loss(inputs, targets, reduction="none", documents=documents)

    with evaluating(decoder):
        for begin in range(0, len(windows), world.size):
            number = begin + world.rank
            mine = number < len(windows)
            inputs, targets = windows.batch(number if mine else 0)
            with autocast:
                each = parallel.call(one_by_one, inputs.to(device), targets.to(device))
            if not mine:
                continue
            rows = slice(number * windows.batch_size, number * windows.batch_size + len(inputs))
            seen = max(0, decoder.config.relaxed_prefix - 1)
            tokens[rows] = (targets[:, seen:] != IGNORED).sum(1)
            losses[rows] = each.double().sum(1).cpu() / tokens[rows]
            least = optimal(windows.token_file, inputs, targets)
            if least is not None:
                best = torch.zeros_like(losses) if best is None else best
                best[rows] = least[:, seen:].sum(1) / tokens[rows]
        parallel.settle()
    known = any(world.gather(best is not None))
    losses, tokens = world.sum(losses), world.sum(tokens)
    frame = pl.DataFrame(
        {"window": range(len(losses)), "loss": losses.tolist(), "tokens": tokens.tolist()}
    )
    if known:
        best = world.sum(torch.zeros_like(losses) if best is None else best)
        frame = frame.with_columns(optimal=pl.Series(best.tolist()))
    domains = windows.domains()
    if domains is not None:
        frame = frame.with_columns(domain=pl.Series(domains))
    return frame.filter(pl.col("tokens") > 0)


def optimal(token_file: Tokens, inputs: Tensor, targets: Tensor) -> Tensor | None:
    """Return the nats that a task itself loses at each target, (rows, L); None for text.

    Targets of -100 count nothing.
    """
    rows = torch.cat([inputs[:, :1], targets.clamp(min=0)], 1)
    least = token_file.optimal(rows.numpy())
    return None if least is None else torch.from_numpy(least).where(targets != IGNORED, 0.0)


def mean_loss(windows: pl.DataFrame) -> Estimate:
    """Return Σ nll / Σ tokens over windows and its standard error, in nats a token."""
    return weighted_mean(windows["loss"], windows["tokens"])


FIGURES = {
    **{
        name: (name, "paper", "all")
        for part in ("share", "mass")
        for name in (f"first_key_{part}_with_row_0", f"first_key_{part}_without_row_0")
    },
    "entropy": ("entropy", "code", "all"),
    "rank": ("rank", "paper", "all"),
    "near_rank_1": ("near_rank_1", "paper", "all"),
    "lazy": ("lazy", "paper", "all"),
    "bos_mass_trigger": ("bos_mass", "paper", "trigger"),
    "bos_mass_other": ("bos_mass", "paper", "other"),
    "value_drain": ("value_drain", "paper", "first"),
    "residual_peak": ("residual_peak", "paper", "first"),
    "kurtosis_first": ("kurtosis", "paper", "first"),
    "kurtosis_rest": ("kurtosis", "paper", "rest"),
    "max_activation_first": ("max_activation", "paper", "first"),
    "max_activation_rest": ("max_activation", "paper", "rest"),
}
"""Metric, variant and position of each figure that a run logs, as docs/metrics.md defines them."""
FOLLOWED = ("bos_mass", "value_drain", "residual_peak")
"""Metrics that a run logs of each layer and head where it is asked to."""


_AS_IT_IS = contextlib.nullcontext()


class _Layers(Probe):
    """Every `size`-th layer's events, from `rank` on, for a probe."""

    def __init__(self, probe: Probe, world: World) -> None:
        self.probe = probe
        self.world = world

    def see(self, event: Event) -> None:
        if event.layer % self.world.size == self.world.rank:
            self.probe.see(event)

    def rows(self) -> Frame:
        return self.probe.rows()


def _precision(config: Config, parallel: Parallel) -> contextlib.AbstractContextManager[object]:
    """Return the context of a pass that probes watch: the weights' own precision.

    Blocks in shares get theirs in that of training, which asks for its context.
    """
    if not parallel.in_shares:
        return _AS_IT_IS
    return autocast(config.train, parallel.decoder.head.weight.device)


def watched(
    model: Decoder | Parallel,
    windows: ValidationWindows,
    num_sequences: int,
    *,
    autocast: contextlib.AbstractContextManager[object] = _AS_IT_IS,
) -> dict[str, float]:
    """Return each figure's mean over layers, on the first whole windows of the validation set.

    Every process calls it, and each looks at its share of the layers.
    """
    return _figures(observed(model, windows, num_sequences, autocast=autocast))


@torch.no_grad()
def observed(
    model: Decoder | Parallel,
    windows: ValidationWindows,
    num_sequences: int,
    more: Sequence[Probe] = (),
    *,
    autocast: contextlib.AbstractContextManager[object] = _AS_IT_IS,
) -> Frame:
    """Return what the probes of `FIGURES`, and `more`, saw of each layer and head, as `watched`."""
    parallel = model if isinstance(model, Parallel) else Alone(model, ALONE)
    decoder, world = parallel.decoder, parallel.world
    device = decoder.head.weight.device
    sequences = torch.cat(whole_windows(windows, num_sequences))
    triggers = windows.token_file.is_trigger(sequences.numpy())
    bos = BosMass(None if triggers is None else torch.from_numpy(triggers))
    probes = Sinks(), bos, Entropy(), Ranks(), Values(curve=1), Outliers(), Smoothing(), *more
    layers = watch(decoder, *(_Layers(probe, world) for probe in probes))
    with evaluating(decoder), autocast, layers as seen:
        parallel.call(decoder.hidden, sequences.to(device))
    parallel.settle()
    rows = seen.frame
    everywhere = [tuple(row) for part in world.gather(rows.rows()) for row in part]
    return pl.DataFrame(everywhere, schema=rows.schema, orient="row").sort(
        "layer", maintain_order=True
    )


@torch.no_grad()
def head_weights(
    parallel: Parallel,
    windows: ValidationWindows,
    size: int,
    step: int,
    autocast: contextlib.AbstractContextManager[object],
) -> list[HeadWeights]:
    """Return every head's weights among the first `size` tokens of the first window.

    Every process calls it. A causal model's weights do not depend on the tokens after them.
    """
    decoder = parallel.decoder
    tokens = whole_windows(windows, 1)[0][:, :size]
    config = decoder.config
    probe = AttentionPictures(
        layers=range(config.num_layers), heads=range(config.num_heads), size=size
    )
    with evaluating(decoder), autocast, watch(decoder, probe):
        parallel.call(decoder.hidden, tokens.to(decoder.head.weight.device))
    parallel.settle()
    ids = tuple(tokens[0].tolist())
    return [
        HeadWeights(
            step=step, layer=layer, head=head, tokens=ids,
            weights=tuple(tuple(round(each, 4) for each in row) for row in picture.tolist()),
        )
        for (layer, head), picture in sorted(probe.pictures().items())
    ]  # fmt: skip


def whole_windows(windows: ValidationWindows, number: int) -> list[Int[Tensor, "1 L"]]:
    """Return the inputs of the first `number` windows that no end of text fills up, or of all."""
    rows: list[Tensor] = []
    for inputs, targets in windows:
        whole = inputs[targets[:, -1] != IGNORED][: number - len(rows)]
        rows += whole.split(1) if len(whole) else ()
        if len(rows) == number:
            break
    return rows or [windows.batch(0)[0][:1]]


def rows_of(windows: ValidationWindows, number: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs and targets of the first `number` windows, one row each."""
    for inputs, targets in windows:
        for row in range(min(number, len(inputs))):
            yield inputs[row : row + 1], targets[row : row + 1]
        number -= len(inputs)
        if number <= 0:
            return


def _figures(rows: Frame) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, (metric, variant, position) in FIGURES.items():
        chosen = rows.filter(
            rows["head"].is_null()
            & (rows["metric"] == metric)
            & (rows["variant"] == variant)
            & (rows["position"] == position)
        )
        mean = mean_over_layers(chosen)
        if mean is not None and math.isfinite(mean):
            found[name] = mean
    return found


def quantization_damage(
    config: Config, decoder: Decoder, windows: ValidationWindows
) -> dict[str, dict[str, float | None]]:
    """Return each scheme's `perplexity`, `increase` over full precision and `divergence` (KL, nats
    a token), on the first whole validation windows, every one alone; None of what overflows.
    """
    settings = config.train.quantize
    if not settings.schemes:
        return {}
    device = decoder.head.weight.device
    sequences = [row.to(device) for row in whole_windows(windows, settings.num_sequences)]
    with evaluating(decoder):
        forms = {scheme: quantize(decoder, scheme) for scheme in settings.schemes}
        found = measure(config.name, decoder, forms, sequences)
    return {
        scheme: {
            "perplexity": finite(found.perplexity(scheme)[0]),
            "increase": finite(found.increase(scheme)[0]),
            "divergence": finite(found.divergence(scheme)[0]),
        }
        for scheme in settings.schemes
    }


def forget_peak(device: torch.device) -> None:
    """Begin to measure a GPU's peak anew, so that it is one run's and not that of those before."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def training_bytes(decoder: Decoder, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the bytes of the weights and of the optimizer, and on a GPU the peak of all.

    The optimizer's are its state and, of OrthoAdam, the rotations, which no checkpoint holds.
    Gradients take as many bytes as the weights; activations depend on the batch and are in the
    peak alone.
    """
    weights = {id(p): p.numel() * p.element_size() for p in decoder.parameters()}
    state = sum(
        value.numel() * value.element_size()
        for entry in optimizer.state.values()
        for value in entry.values()
        if isinstance(value, torch.Tensor)
    )
    if isinstance(optimizer, OrthoAdam):
        state += optimizer.rotation_bytes()
    found: dict[str, Any] = {"weights": sum(weights.values()), "optimizer": state}
    device = decoder.head.weight.device
    if device.type == "cuda":
        found["peak"] = torch.cuda.max_memory_allocated(device)
    return found


_LARGEST_EXPONENT = 700.0
"""e to this is still a float; JSON has no infinity."""


def diagnose(
    config: Config,
    run: Run,
    parallel: Parallel,
    windows: ValidationWindows,
    step: int,
    write_scalars: Write,
) -> None:
    """Measure the chosen figures and record them; before the first step those of heads alone."""
    settings = config.train.diagnose
    if settings.attention:
        precision = _precision(config, parallel)
        for weights in head_weights(parallel, windows, settings.attention, step, precision):
            run.append({"kind": weights.kind, **to_table(weights)}, log=weights.log)
    precision = _precision(config, parallel)
    seen = observed(parallel, windows, settings.num_sequences, autocast=precision)
    if settings.heads:
        run.append(*_followed(seen, step), log="trajectories.jsonl")
    if step:
        row = {"kind": "diagnosis", "step": step, **_figures(seen)}
        run.append(row)
        write_scalars(row)


def _logged(run: Run, step: int) -> dict[str, float]:
    """Return the figures of the diagnosis after a step, empty where there was none."""
    found: dict[str, float] = {}
    for row in run.metrics():
        if (row["kind"], row["step"]) == ("diagnosis", step):
            found = {name: value for name, value in row.items() if name not in ("kind", "step")}
    return found


def _followed(seen: Frame, step: int) -> list[dict[str, Any]]:
    """Return the rows of trajectories.jsonl."""
    rows = seen.filter(seen["metric"].is_in(FOLLOWED)).select(*list(TRAJECTORIES)[1:])
    return [{"kind": "figure", "step": step, **row} for row in rows.iter_rows(named=True)]


def validate(
    config: Config,
    run: Run,
    parallel: Parallel,
    windows: ValidationWindows,
    step: int,
    write_scalars: Write,
) -> tuple[pl.DataFrame, Evaluation]:
    """Evaluate on the full validation set and record the result."""
    device = parallel.decoder.head.weight.device
    frame = evaluate(
        parallel,
        windows,
        autocast(config.train, device),
        cross_documents=config.data.cross_documents,
    )
    loss, error = mean_loss(frame)
    if not math.isfinite(loss):
        raise Diverged(
            f"the validation loss is {loss} after step {step}; lower optimizer.lr, or look at the "
            "validation text"
        )
    best, over, over_error = None, None, None
    if "optimal" in frame.columns:
        best, _ = weighted_mean(frame["optimal"], frame["tokens"])
        over, over_error = weighted_mean(frame["loss"] - frame["optimal"], frame["tokens"])
    domains = None
    if "domain" in frame.columns:
        parts = frame.partition_by("domain", as_dict=True, maintain_order=True)
        domains = {str(name): mean_loss(part)[0] for (name,), part in parts.items()}
    row = Evaluation(
        step=step,
        loss=loss,
        standard_error=finite(error),
        num_windows=len(frame),
        num_tokens=int(frame["tokens"].sum()),
        optimal_loss=best,
        excess_loss=over,
        excess_standard_error=None if over_error is None else finite(over_error),
        domains=domains,
    )
    write_scalars(record(run, row))
    return frame, row


def best_loss(config: Config, world: World, batches: Batches, batch: Tensor) -> float | None:
    """Return the loss of the task itself on a step's tokens.

    None for text, whose own loss nobody knows, and for a loss that is not the cross-entropy.
    """
    if config.train.distill.teacher:
        return None
    best = optimal(batches.token_file, batch[:, :-1], batch[:, 1:])
    if best is None:
        return None
    mean = best[:, max(0, config.model.relaxed_prefix - 1) :].mean()
    return (world.sum(mean) / world.size).item()


def finish(
    config: Config,
    run: Run,
    parallel: Parallel,
    optimizer: torch.optim.Optimizer,
    data: Data,
    windows: ValidationWindows,
    write_scalars: Write,
) -> None:
    """Evaluate, continue the sample prompts and write the run's figures.

    The last two are the first process's work alone, with the whole model; the others end before.
    """
    steps = config.train.steps
    run.keep_metrics_before_final(steps)
    frame, row = validate(config, run, parallel, windows, steps, write_scalars)
    settings = config.train.diagnose
    diagnosis: dict[str, float] = {}
    if settings.every:
        world, precision = parallel.world, _precision(config, parallel)
        logged = world.gather(_logged(run, steps) if world.first else None)[0]
        diagnosis = logged or watched(parallel, windows, settings.num_sequences, autocast=precision)
    if not parallel.world.first:
        return
    used = training_bytes(parallel.decoder, optimizer)
    decoder = _whole(config, run, parallel)
    run.write_frame("validation.parquet", frame.with_columns(step=steps))
    run.finish_metrics()
    trained = rows(run, Step)
    summary = Summary(
        steps=steps,
        tokens=trained[-1].tokens,
        seconds=trained[-1].seconds,
        tokens_per_second=statistics.median(step.tokens_per_second for step in trained),
        parameters=Parameters(**decoder.num_parameters()),
        kv_cache_bytes_per_token=decoder.cache_bytes_per_token,
        kv_cache_dtype=str(decoder.head.weight.dtype).removeprefix("torch."),
        validation=AtTheEnd(
            **{entry.name: getattr(row, entry.name) for entry in dataclasses.fields(Validated)},
            perplexity=math.exp(min(row.loss, _LARGEST_EXPONENT)),
            length=config.train.length,
        ),
        diagnosis=diagnosis,
        quantization=quantization_damage(config, decoder, windows),
        bytes=used,
        samples=tuple(_samples(config, decoder, data)),
        data=data_facts(data),
    )
    run.write_json("summary.json", summary)


def _whole(config: Config, run: Run, parallel: Parallel) -> Decoder:
    """Return the whole model as others read it, its adapters merged.

    Where it is in shares or has adapters, it comes from the last step's checkpoint.
    """
    if not (parallel.in_shares or config.train.lora.rank):
        return parallel.decoder
    decoder = Decoder(config.model)
    weight = parallel.decoder.head.weight
    decoder.to(weight.dtype)
    checkpoint.load_model(checkpoint.newest(run.checkpoints), decoder)
    return decoder.to(weight.device)


def _samples(config: Config, decoder: Decoder, data: Data) -> Iterator[Sample]:
    settings, bos = config.sample, bos_of(config, data)
    before = [] if bos is None else [bos]
    decoder.eval()
    for prompt in settings.prompts:
        # A document begins with the end of the one before; an empty prompt begins one.
        ids = [*before, *data.tokenizer.encode(prompt)] or [data.tokenizer.end_of_text]
        room = config.model.context - len(ids)
        readable = room >= 0 and len(ids) >= config.model.relaxed_prefix
        new = generate(
            decoder,
            ids if readable else [data.tokenizer.end_of_text],
            num_tokens=min(settings.num_tokens, room) if readable else 0,
            temperature=settings.temperature,
            top_k=settings.top_k,
            seed=settings.seed,
            stop={data.tokenizer.end_of_text},
        )
        text = data.tokenizer.decode(list(new))
        yield Sample(
            prompt=prompt, text=text, temperature=settings.temperature, top_k=settings.top_k,
            seed=settings.seed,
        )  # fmt: skip
