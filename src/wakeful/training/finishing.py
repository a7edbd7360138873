"""Measurements of a trained run: loss, figures, damage by quantization, bytes."""

import dataclasses
import math
import statistics
from typing import Any

import torch

from wakeful.config.schema import Config
from wakeful.data.order import ValidationWindows
from wakeful.estimates import finite_or_none
from wakeful.model.decoder import Decoder
from wakeful.model.evaluating import evaluating
from wakeful.optim.orthoadam import OrthoAdam
from wakeful.optim.saved import to_json
from wakeful.runs import checkpoint
from wakeful.runs.records import (
    AtTheEnd,
    Parameters,
    RunSummary,
    StepRow,
    ValidationLoss,
    data_facts,
    logged_rows,
)
from wakeful.training.setup import Training
from wakeful.training.validation import validate
from wakeful.training.watching import logged_diagnosis, whole_windows


def quantization_damage(
    config: Config, decoder: Decoder, windows: ValidationWindows
) -> dict[str, dict[str, float | None]]:
    """Return for each scheme of `train.quantize` the quantized model's `perplexity`, its
    `increase` over full precision, and the `divergence` from it (KL in nats per token).

    They are measured on the first validation windows that have no padding, each a sequence of its
    own. A figure that overflows is None. The decoder is not changed.
    """
    settings = config.train.quantize
    if not settings.schemes:
        return {}
    from wakeful.quantization import measure_damage, quantize_module  # noqa: PLC0415 - Transformers takes seconds to import

    device = decoder.head.weight.device
    sequences = [row.to(device) for row in whole_windows(windows, settings.num_sequences)]
    with evaluating(decoder):
        quantized = {scheme: quantize_module(decoder, scheme) for scheme in settings.schemes}
        damage = measure_damage(config.name, decoder, quantized, sequences)
    return {  # estimates without their errors, [0]
        scheme: {
            "perplexity": finite_or_none(damage.perplexity(scheme)[0]),
            "increase": finite_or_none(damage.perplexity_increase(scheme)[0]),
            "divergence": finite_or_none(damage.divergence(scheme)[0]),
        }
        for scheme in settings.schemes
    }


def forget_peak(device: torch.device) -> None:
    """Reset a GPU's peak memory, so that it does not include earlier runs."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def training_bytes(decoder: Decoder, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the bytes of the `weights` and of the `optimizer`, and on a GPU the `peak` of all
    memory since `forget_peak`.

    The optimizer's bytes are its state and, of OrthoAdam, the rotations, which no checkpoint holds.
    Gradients, as many bytes as the weights, and activations are counted in the peak alone.
    """
    tensors: dict[str, torch.Tensor] = {}
    for number, entry in enumerate(optimizer.state.values()):
        to_json(entry, str(number), tensors)  # collects the entry's tensors, at any depth
    state = sum(tensor.nbytes for tensor in tensors.values())
    if isinstance(optimizer, OrthoAdam):
        state += optimizer.rotation_bytes()
    weights = sum(parameter.nbytes for parameter in decoder.parameters())
    counts: dict[str, Any] = {"weights": weights, "optimizer": state}
    device = decoder.head.weight.device
    if device.type == "cuda":
        counts["peak"] = torch.cuda.max_memory_allocated(device)
    return counts


_LARGEST_EXPONENT = 700.0
"""e to this is still a float; JSON has no infinity."""


def finish_run(training: Training) -> None:
    """Evaluate the trained model on the validation set, measure the run's other figures, and write
    validation.parquet, metrics.parquet and summary.json.

    Every process calls it and evaluates; the first one alone does the rest, with the whole model.
    """
    config, run, steps = training.config, training.run, training.config.train.steps
    frame, row = validate(training, steps)
    if not training.world.first:
        return
    # Before the whole model takes memory too.
    bytes_used = training_bytes(training.decoder, training.optimizer)
    decoder = _whole_model(training)
    run.write_frame("validation.parquet", frame.with_columns(step=steps))
    run.write_frame("metrics.parquet", run.logged())
    trained = logged_rows(run, StepRow)
    summary = RunSummary(
        steps=steps,
        tokens=trained[-1].tokens,
        seconds=trained[-1].seconds,
        tokens_per_second=statistics.median(step.tokens_per_second for step in trained),
        parameters=Parameters(**decoder.num_parameters()),
        kv_cache_bytes_per_token=decoder.cache_bytes_per_token,
        kv_cache_dtype=str(decoder.head.weight.dtype).removeprefix("torch."),
        validation=AtTheEnd(
            **{  # the fields that the logged row shares with the summary
                entry.name: getattr(row, entry.name) for entry in dataclasses.fields(ValidationLoss)
            },
            perplexity=math.exp(min(row.loss, _LARGEST_EXPONENT)),
            length=config.train.length,
        ),
        diagnosis=logged_diagnosis(run, steps),
        quantization=quantization_damage(config, decoder, training.windows),
        bytes=bytes_used,
        data=data_facts(training.data),
    )
    run.write_json("summary.json", summary)


def _whole_model(training: Training) -> Decoder:
    """Return the whole model; if training has sharded it, read it from the last checkpoint."""
    if not training.parallel.is_sharded:
        return training.decoder
    decoder = Decoder(training.config.model)
    weight = training.decoder.head.weight
    decoder.to(weight.dtype)
    checkpoint.load_model(checkpoint.newest_checkpoint(training.run.checkpoints), decoder)
    return decoder.to(weight.device)
