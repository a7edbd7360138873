"""Costs of serving a model: its size, and tokens per second after prompts of several lengths."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from wakeful.config.reading import DECODED_TOKENS, longest_prompt
from wakeful.errors import WakefulError
from wakeful.hf.cache import CACHE
from wakeful.loading.model import Model
from wakeful.model.decoder import Decoder
from wakeful.probes.running import as_decoder, held_bytes
from wakeful.quantization import QuantizedLinear
from wakeful.scores import Score
from wakeful.terminal.display import OnProgress

ROUNDS = 3
OURS, THEIRS = "our decoder", "Transformers"
"""The implementations that run models."""


def check_lengths(model: Model, lengths: Sequence[int]) -> None:
    """Raise `WakefulError` if a prompt and its generated tokens exceed the model's context."""
    longest = max(lengths)
    if longest > longest_prompt(model.context):
        raise WakefulError(
            f"speed = {longest}: the prompt, the first token and {DECODED_TOKENS} after it are "
            f"more than {model.name}'s context of {model.context:,}"
        )


def measure_costs(model: Model, lengths: Sequence[int], *, progress: OnProgress) -> list[Score]:
    """Return scores of the model's size, and of its speed after prompts of these lengths.

    Size: parameters, megabytes of weights in memory, kilobytes of cache per token at the longest
    prompt. Speed, of one sequence: tokens per second of the prompt until the first new token
    (prefill), and of the greedy tokens after it (decode). It is measured in `ROUNDS` rounds, after
    one that is not measured; the error is over rounds. Cache and speed depend on the
    implementation, `OURS` or `THEIRS`. `progress` is called with the rounds done and `ROUNDS`.

    Raises:
        WakefulError: a length that does not fit into the model's context.
    """
    check_lengths(model, lengths)
    prompts = {length: _random_prompt(model, length) for length in lengths}
    for prompt in prompts.values():  # the round that is not measured
        _time_generation(model, prompt)
    prefill_seconds: dict[int, list[float]] = {length: [] for length in lengths}
    decode_seconds: dict[int, list[float]] = {length: [] for length in lengths}
    for round_index in range(ROUNDS):
        progress(round_index, ROUNDS)
        for length, prompt in prompts.items():
            prefill, decode = _time_generation(model, prompt)
            prefill_seconds[length].append(prefill)
            decode_seconds[length].append(decode)
    progress(ROUNDS, ROUNDS)
    prefill_scores = [
        _speed_score(model, f"prefill of {length:,}, tokens/s", length, seconds)
        for length, seconds in prefill_seconds.items()
    ]
    decode_scores = [
        _speed_score(model, f"decode after {length:,}, tokens/s", DECODED_TOKENS, seconds)
        for length, seconds in decode_seconds.items()
    ]
    return [*_measure_sizes(model, max(lengths)), *prefill_scores, *decode_scores]


def _speed_score(model: Model, metric: str, num_tokens: int, seconds: Sequence[float]) -> Score:
    """Return a speed as a score whose examples are the rounds: `num_tokens` / `seconds` of each."""
    return Score(
        model=model.name, task="speed", metric=metric,
        keys=tuple(f"round {index}" for index in range(len(seconds))),
        values=np.full(len(seconds), float(num_tokens)), weights=np.array(seconds), is_cost=True,
        implementation=code_of(model.module),
    )  # fmt: skip


def code_of(module: nn.Module) -> str:
    """Return the implementation that runs a module: `OURS` if the module is or holds our decoder,
    as our class for Transformers does, else `THEIRS`.
    """
    return OURS if any(isinstance(part, Decoder) for part in module.modules()) else THEIRS


def _random_prompt(model: Model, length: int) -> list[int]:
    """Return `length` random token ids, the same for all models with 1,000 tokens or more.

    Which tokens they are does not change the time.
    """
    decoder = as_decoder(model.module)
    embedding: Any = model.module.get_input_embeddings() if decoder is None else decoder.embed  # pyright: ignore[reportCallIssue]
    num_ids = min(1000, embedding.num_embeddings)
    generator = torch.Generator().manual_seed(0)
    return torch.randint(num_ids, (length,), generator=generator).tolist()


def _time_generation(model: Model, prompt: list[int]) -> tuple[float, float]:
    """Generate `DECODED_TOKENS` + 1 tokens greedily; return the seconds until the first of them,
    and the seconds from there to the last.
    """
    tokens = model.generate_ids(prompt, num_tokens=DECODED_TOKENS + 1, temperature=0.0)
    start = time.perf_counter()
    next(tokens)  # a token on the CPU: the device has finished it
    first_token = time.perf_counter()
    for _ in tokens:
        pass
    return first_token - start, time.perf_counter() - first_token


def _count_parameters(module: nn.Module) -> int:
    """Return the number of parameters, with the weights and biases of quantized layers, which are
    buffers, counted as before quantization.
    """
    count = sum(parameter.numel() for parameter in module.parameters())
    for layer in module.modules():
        if isinstance(layer, QuantizedLinear):
            count += layer.in_features * layer.out_features
            count += 0 if layer.bias is None else layer.bias.numel()
    return count


def _measure_sizes(model: Model, length: int) -> list[Score]:
    """Return the scores of a model's size: parameters in millions, weights in MB and, if it can be
    measured, the cache after a prompt of `length` tokens in KB per token.
    """
    code = code_of(model.module)
    weight_bytes = held_bytes([*model.module.parameters(), *model.module.buffers()])
    cache_bytes = _cache_bytes(model, length)
    figures = {
        "parameters, M": _count_parameters(model.module) / 1e6,
        "weights, MB": weight_bytes / 1e6,
    }
    if cache_bytes is not None:
        figures["cache, KB a token"] = cache_bytes / length / 1e3
    return [
        Score(model=model.name, task="size", metric=metric, keys=("all",),
              values=np.array([value]), weights=np.ones(1), higher_is_better=False,
              is_cost=True, implementation=code if "cache" in metric else "")
        for metric, value in figures.items()
    ]  # fmt: skip


_HELD = ("keys", "values", "conv_states", "recurrent_states")
"""Attributes of Transformers' cache layers that hold state: attention and linear attention."""


@torch.inference_mode()
def _cache_bytes(model: Model, length: int) -> int | None:
    """Return the bytes of the cache after a prompt of `length` tokens: keys, values and states of
    linear attention. Return None if a layer's cache holds something else.
    """
    decoder = as_decoder(model.module)
    if decoder is not None:  # a cache of our decoder knows its size before anything is run
        return decoder.new_cache(1, length).num_bytes
    tokens = torch.tensor([_random_prompt(model, length)], device=model.device)
    cache = model.module(input_ids=tokens, use_cache=True)[CACHE]
    total = 0
    for layer in cache.layers:
        states = [vars(layer)[name] for name in _HELD if name in vars(layer)]
        if not states:
            return None
        for state in states:
            tensors = state.values() if isinstance(state, dict) else [state]
            # A state that is not used yet may be None.
            total += sum(tensor.nbytes for tensor in tensors if isinstance(tensor, torch.Tensor))
    return total
