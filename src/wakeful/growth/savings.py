"""What a smaller model saves, measured on the machine at hand."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wakeful.model.decoder import Decoder
from wakeful.model.generate import generate

_ROUNDS = 3


@dataclass(frozen=True)
class Footprint:
    """Size and speed of one model."""

    parameters: int
    weight_bytes: int
    """Bytes of the live parameters, a tied one once."""
    cache_bytes_per_token: int
    cache_bytes: int
    """Bytes of a live cache of `context` tokens."""
    context: int
    tokens_per_second: float
    """Greedy generation after a short prompt, one sequence: the median of the rounds."""


def measure(
    decoders: Mapping[str, Decoder], prompt: Sequence[int], *, num_tokens: int, context: int
) -> dict[str, Footprint]:
    """Return each model's footprint; they generate by turns, so that a busy machine slows all."""
    speeds: dict[str, list[float]] = {name: [] for name in decoders}
    for decoder in decoders.values():
        decoder.eval()
        list(generate(decoder, list(prompt), num_tokens=2, temperature=0.0))
    for _ in range(_ROUNDS):
        for name, decoder in decoders.items():
            began = time.perf_counter()
            written = list(generate(decoder, list(prompt), num_tokens=num_tokens, temperature=0.0))
            speeds[name].append(len(written) / (time.perf_counter() - began))
    return {
        name: _footprint(decoder, context, statistics.median(speeds[name]))
        for name, decoder in decoders.items()
    }


def _footprint(decoder: Decoder, context: int, speed: float) -> Footprint:
    context = min(context, decoder.config.max_length)
    cache = decoder.new_cache(1, context)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes()
                for p in decoder.parameters()}  # fmt: skip
    return Footprint(
        parameters=decoder.num_parameters()["total"],
        weight_bytes=sum(storages.values()),
        cache_bytes_per_token=decoder.cache_bytes_per_token,
        cache_bytes=cache.num_bytes,
        context=context,
        tokens_per_second=speed,
    )
