"""Training, from top to bottom."""

import contextlib
import math
import signal
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch

from wakeful.config import Config, config_to_toml
from wakeful.data.order import Batches, ValidationWindows
from wakeful.data.tokens import PreparedData
from wakeful.errors import Interrupted, WakefulError
from wakeful.model.decoder import Decoder
from wakeful.model.generate import generate
from wakeful.optim.schedules import warmup_cosine
from wakeful.run import Run, environment
from wakeful.train import checkpoint
from wakeful.train.diagnosis import measure
from wakeful.train.evaluate import evaluate, mean_loss
from wakeful.train.facts import check_same_data, data_facts
from wakeful.train.figures import check_schemes, quantization_damage, training_bytes
from wakeful.train.objective import Loss, make_loss
from wakeful.train.progress import Display, Silent
from wakeful.train.setup import (
    autocast,
    choose_device,
    load_data,
    make_decoder,
    make_optimizer,
    resolved,
)
from wakeful.train.tensorboard import Write, check_installed, scalar_writer

_LARGEST_EXPONENT = 700.0
"""e to this is still a float; JSON has no infinity."""


@dataclass(frozen=True)
class Initial:
    """Weights to start from instead of random ones."""

    decoder: Decoder
    """The model itself, in the precision to train in; it is trained in place."""
    origin: Mapping[str, Any]
    """Where the weights come from, as run.json records it under "initial"."""


def train(
    config: Config,
    path: str | Path,
    *,
    resume: bool = False,
    initial: Initial | None = None,
    show: Display | None = None,
) -> Run:
    """Train one model into the run directory `path` and return it.

    `resume` continues the run that is there from its newest checkpoint: on one machine's CPU the
    losses and the final weights are those of a run that was never interrupted, to the bit.
    `initial` weights become the run's checkpoint of step 0, so that resuming needs them no more,
    and are evaluated before the first step; the model is then theirs, whose vocabulary may be
    larger than the data's.

    Raises:
        WakefulError: see its message; whatever was there before is kept.
    """
    show = show or Silent()
    if resume:
        config = Run.open(path).config
    elif Path(path).exists():
        Run(path).refuse_existing()
    device = choose_device(config.train.device)
    check_installed(enabled=config.train.tensorboard)
    check_schemes(config)
    data = load_data(config.data, show.stage)
    config = config if resume else resolved(config, data, initial and initial.decoder.config)
    batches = Batches(
        data.train,
        length=config.train.length,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
    )
    windows = ValidationWindows(
        data.validation, length=config.train.length, batch_size=config.train.eval_batch_size
    )
    decoder = make_decoder(config, device, None if resume or initial is None else initial.decoder)
    optimizer = make_optimizer(config, decoder)
    loss = make_loss(config, decoder, device)

    if resume:
        run = Run.open(path)
        check_same_data(run, data)
    else:
        _create(config, path, data, decoder, optimizer, initial)
        run = Run.open(path)

    with run.lock(), _stop_signals() as stopped:
        run.set_status("running")
        first, tokens, seconds = 0, 0, 0.0
        if resume and checkpoint.steps(run.checkpoints):
            newest = checkpoint.newest(run.checkpoints)
            checkpoint.load_model(newest, decoder)
            progress = checkpoint.load_optimizer(newest, optimizer)
            first, tokens, seconds = progress["step"], progress["tokens"], progress["seconds"]
            checkpoint.prune(run.checkpoints, keep=config.train.keep_checkpoints)
        run.keep_metrics(first or -1)
        write_scalars = scalar_writer(run.path, enabled=config.train.tensorboard, first=first + 1)
        try:
            if first == 0 and "initial" in run.header:
                _validate(config, run, decoder, windows, 0, write_scalars)
            _steps(
                config, run, decoder, optimizer, loss, batches, windows, show, write_scalars,
                stopped, first=first, tokens=tokens, seconds=seconds,
            )  # fmt: skip
            _finish(config, run, decoder, optimizer, data, windows, write_scalars)
        except BaseException:
            run.set_status("stopped")
            raise
        run.set_status("done")
    return run


def _create(
    config: Config,
    path: str | Path,
    data: PreparedData,
    decoder: Decoder,
    optimizer: torch.optim.Optimizer,
    initial: Initial | None,
) -> None:
    """Make the run directory, with the weights it starts from where they are given."""
    origin = {"initial": dict(initial.origin)} if initial is not None else {}
    with Run.create(path, "train", {"name": config.name, **origin}) as new:
        new.write_text("config.toml", config_to_toml(config))
        new.write_json("environment.json", environment(decoder.head.weight.device))
        new.write_json("data.json", data_facts(data))
        data.tokenizer.save(new.path)
        if initial is not None:
            start = {"step": 0, "tokens": 0, "seconds": 0.0}
            checkpoint.save(new.checkpoints, 0, decoder, optimizer, start, keep=1)


def _steps(
    config: Config,
    run: Run,
    decoder: Decoder,
    optimizer: torch.optim.Optimizer,
    loss_of: Loss,
    batches: Batches,
    windows: ValidationWindows,
    show: Display,
    write_scalars: Write,
    stopped: list[int],
    *,
    first: int,
    tokens: int,
    seconds: float,
) -> None:
    settings, optim = config.train, config.optimizer
    device = decoder.head.weight.device
    micro = settings.micro_batch_size or settings.batch_size
    parts = settings.batch_size // micro
    mixed = autocast(config, device)
    parameters = [p for p in decoder.parameters() if p.requires_grad]
    saved = first
    decoder.train()

    for step in range(first, settings.steps):
        began = time.perf_counter()
        lr = warmup_cosine(
            step,
            steps=settings.steps,
            warmup_steps=optim.warmup_steps,
            initial=optim.initial_lr,
            peak=optim.lr,
            final=optim.final_lr,
        )
        for group in optimizer.param_groups:
            group["lr"] = lr

        batch = batches.batch(step)
        part_losses: list[torch.Tensor] = []
        for part in batch.to(device, non_blocking=True).split(micro):
            with mixed:
                part_loss = loss_of(part[:, :-1], part[:, 1:]) / parts
            part_loss.backward()
            part_losses.append(part_loss.detach())
        loss = torch.stack(part_losses).sum().item()
        norm = torch.nn.utils.clip_grad_norm_(parameters, optim.clip or math.inf).item()
        if not math.isfinite(loss):
            raise WakefulError(_not_finite(run, batches, step, f"the loss is {loss}"))
        if not math.isfinite(norm):
            raise WakefulError(_not_finite(run, batches, step, f"the gradient norm is {norm}"))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

        elapsed = time.perf_counter() - began
        tokens += batch.shape[0] * (batch.shape[1] - 1)
        seconds += elapsed
        done = step + 1
        row = {
            "kind": "train",
            "step": done,
            "loss": loss,
            "lr": lr,
            "grad_norm": norm,
            "tokens": tokens,
            "seconds": round(seconds, 4),
            "tokens_per_second": round(settings.batch_size * settings.length / elapsed, 1),
        }
        run.append(row)
        write_scalars(row)
        show.step(done, settings.steps, loss, row["tokens_per_second"])

        last = done == settings.steps
        if not last and settings.eval_every and done % settings.eval_every == 0:
            _validate(config, run, decoder, windows, done, write_scalars)
        if settings.diagnose.every and done % settings.diagnose.every == 0:
            _diagnose(config, run, decoder, windows, done, write_scalars)
        due = settings.checkpoint_every and done % settings.checkpoint_every == 0
        if last or due or stopped:
            if not all(parameter.isfinite().all() for parameter in parameters):
                raise WakefulError(_not_finite(run, batches, step, "a weight is not finite"))
            state = {"step": done, "tokens": tokens, "seconds": seconds}
            checkpoint.save(
                run.checkpoints, done, decoder, optimizer, state, keep=settings.keep_checkpoints
            )
            saved = done
        if stopped and not last:
            name = signal.Signals(stopped[0]).name
            raise Interrupted(
                f"stopped by {name} after step {saved}, which is saved; continue with: "
                f"wakeful train --resume {run.path}"
            )


def _diagnose(
    config: Config,
    run: Run,
    decoder: Decoder,
    windows: ValidationWindows,
    step: int,
    write_scalars: Write,
) -> None:
    """Measure the chosen figures and record them."""
    figures = measure(decoder, windows, config.train.diagnose.num_sequences)
    row = {"kind": "diagnosis", "step": step, **figures}
    run.append(row)
    write_scalars(row)


def _validate(
    config: Config,
    run: Run,
    decoder: Decoder,
    windows: ValidationWindows,
    step: int,
    write_scalars: Write,
) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Evaluate on the full validation set and record the result."""
    frame = evaluate(decoder, windows, autocast(config, decoder.head.weight.device))
    loss, error = mean_loss(frame)
    if not math.isfinite(loss):
        raise WakefulError(
            f"the validation loss is {loss} after step {step}; lower optimizer.lr, or look at the "
            "validation text"
        )
    row: dict[str, Any] = {
        "kind": "validation",
        "step": step,
        "loss": loss,
        "standard_error": error if math.isfinite(error) else None,
        "num_windows": len(frame),
        "num_tokens": int(frame["tokens"].sum()),
    }
    run.append(row)
    write_scalars(row)
    return frame, row


def _finish(
    config: Config,
    run: Run,
    decoder: Decoder,
    optimizer: torch.optim.Optimizer,
    data: PreparedData,
    windows: ValidationWindows,
    write_scalars: Write,
) -> None:
    """Evaluate, continue the sample prompts and write the run's figures."""
    steps = config.train.steps
    run.keep_metrics_before_final(steps)
    frame, row = _validate(config, run, decoder, windows, steps, write_scalars)
    run.write_frame("validation.parquet", frame.with_columns(step=steps))
    run.finish_metrics()
    trained = [entry for entry in run.metrics() if entry["kind"] == "train"]
    diagnose = config.train.diagnose
    diagnosis = measure(decoder, windows, diagnose.num_sequences) if diagnose.every else {}
    run.write_json(
        "summary.json",
        {
            "steps": steps,
            "tokens": trained[-1]["tokens"],
            "seconds": trained[-1]["seconds"],
            "tokens_per_second": statistics.median(e["tokens_per_second"] for e in trained),
            "parameters": decoder.num_parameters(),
            "kv_cache_bytes_per_token": decoder.cache_bytes_per_token,
            "kv_cache_dtype": str(decoder.head.weight.dtype).removeprefix("torch."),
            "validation": {
                **{key: row[key] for key in row if key not in ("kind", "step")},
                "perplexity": math.exp(min(row["loss"], _LARGEST_EXPONENT)),
                "length": config.train.length,
            },
            "diagnosis": diagnosis,
            "quantization": quantization_damage(config, decoder, windows),
            "bytes": training_bytes(decoder, optimizer),
            "samples": _samples(config, decoder, data),
            "data": data_facts(data),
        },
    )


def _samples(config: Config, decoder: Decoder, data: PreparedData) -> list[dict[str, Any]]:
    settings = config.sample
    decoder.eval()
    samples: list[dict[str, Any]] = []
    for prompt in settings.prompts:
        # A document begins with the end of the one before; an empty prompt begins one.
        ids = data.tokenizer.encode(prompt) or [data.tokenizer.end_of_text]
        room = config.model.max_length - len(ids)
        readable = room >= 0 and len(ids) >= config.model.relaxed_prefix
        new = generate(
            decoder,
            ids if readable else [data.tokenizer.end_of_text],
            num_tokens=min(settings.num_tokens, room) if readable else 0,
            temperature=settings.temperature,
            top_k=settings.top_k,
            seed=settings.seed,
            stop=data.tokenizer.end_of_text,
        )
        text = data.tokenizer.decode(list(new))
        samples.append(
            {"prompt": prompt, "text": text, "temperature": settings.temperature,
             "top_k": settings.top_k, "seed": settings.seed}
        )  # fmt: skip
    return samples


def _not_finite(run: Run, batches: Batches, step: int, what: str) -> str:
    kept = checkpoint.steps(run.checkpoints)
    good = f"the checkpoint of step {kept[-1]} is kept" if kept else "there is no checkpoint yet"
    starts = ", ".join(str(start) for start in batches.starts(step)[:4])
    return (
        f"{what} at step {step + 1}, on the batch whose sequences begin at training tokens "
        f"{starts}...; {good}. Lower optimizer.lr or optimizer.clip, or look at that text"
    )


@contextlib.contextmanager
def _stop_signals() -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT, so that a step under way ends and is saved; twice is at once."""
    received: list[int] = []

    def receive(number: int, frame: Any) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    try:
        previous = {number: signal.signal(number, receive) for number in (2, 15)}
    except ValueError:  # not the main thread: leave signals alone
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
