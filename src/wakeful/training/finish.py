"""What a run measures besides its training loss, on the way and at the end."""

import math
import statistics
from typing import Any

import polars as pl
import torch
from torch import Tensor

from wakeful.config.schema import Config
from wakeful.data.order import Batches, ValidationWindows
from wakeful.data.tokens import Data
from wakeful.errors import WakefulError
from wakeful.estimates import finite, weighted_mean
from wakeful.model.decoder import Decoder
from wakeful.model.generate import generate
from wakeful.runs import checkpoint
from wakeful.runs.run import Run
from wakeful.training.events import Write
from wakeful.training.facts import data_facts
from wakeful.training.figures import quantization_damage, training_bytes
from wakeful.training.parallel import Parallel
from wakeful.training.setup import autocast, bos_of
from wakeful.training.validate import evaluate_over, mean_loss, optimal
from wakeful.training.watched import measure_over
from wakeful.world import World

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
    """Measure the chosen figures and record them."""
    figures = measure_over(parallel, windows, config.train.diagnose.num_sequences)
    row = {"kind": "diagnosis", "step": step, **figures}
    run.append(row)
    write_scalars(row)


def validate(
    config: Config,
    run: Run,
    parallel: Parallel,
    windows: ValidationWindows,
    step: int,
    write_scalars: Write,
) -> tuple[pl.DataFrame, dict[str, Any]]:
    """Evaluate on the full validation set and record the result."""
    device = parallel.decoder.head.weight.device
    frame = evaluate_over(
        parallel, windows, autocast(config, device), cross_documents=config.data.cross_documents
    )
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
        "standard_error": finite(error),
        "num_windows": len(frame),
        "num_tokens": int(frame["tokens"].sum()),
    }
    if "optimal" in frame.columns:
        best, _ = weighted_mean(frame["optimal"], frame["tokens"])
        over, error = weighted_mean(frame["loss"] - frame["optimal"], frame["tokens"])
        row |= {"optimal_loss": best, "excess_loss": over, "excess_standard_error": finite(error)}
    run.append(row)
    write_scalars(row)
    return frame, row


def excess(
    config: Config, world: World, batches: Batches, batch: Tensor, loss: float
) -> dict[str, float]:
    """Return how much a step's `loss` is above that of the task itself on the same tokens.

    Nothing for text, whose own loss nobody knows, and for a loss that is not the cross-entropy.
    """
    if config.train.distill.teacher:
        return {}
    best = optimal(batches.token_file, batch[:, :-1], batch[:, 1:])
    if best is None:
        return {}
    mean = best[:, max(0, config.model.relaxed_prefix - 1) :].mean()
    return {"excess_loss": loss - (world.sum(mean) / world.size).item()}


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
    diagnosis = measure_over(parallel, windows, settings.num_sequences) if settings.every else {}
    if not parallel.world.first:
        return
    used = training_bytes(parallel.decoder, optimizer)
    decoder = _whole(config, run, parallel)
    run.write_frame("validation.parquet", frame.with_columns(step=steps))
    run.finish_metrics()
    trained = [entry for entry in run.metrics() if entry["kind"] == "train"]
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
            "bytes": used,
            "samples": _samples(config, decoder, data),
            "data": data_facts(data),
        },
    )


def _whole(config: Config, run: Run, parallel: Parallel) -> Decoder:
    """Return the whole model: where it is in shares, from the last step's checkpoint."""
    if not parallel.in_shares:
        return parallel.decoder
    decoder = Decoder(config.model)
    weight = parallel.decoder.head.weight
    decoder.to(weight.dtype)
    checkpoint.load_model(checkpoint.newest(run.checkpoints), decoder)
    return decoder.to(weight.device)


def _samples(config: Config, decoder: Decoder, data: Data) -> list[dict[str, Any]]:
    settings, bos = config.sample, bos_of(config, data)
    before = [] if bos is None else [bos]
    decoder.eval()
    samples: list[dict[str, Any]] = []
    for prompt in settings.prompts:
        # A document begins with the end of the one before; an empty prompt begins one.
        ids = [*before, *data.tokenizer.encode(prompt)] or [data.tokenizer.end_of_text]
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
