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
from wakeful.runs.run import Run
from wakeful.scores import Score
from wakeful.terminal.display import OnProgress

ROUNDS = 3
OURS, THEIRS = "our decoder", "Transformers"
"""The implementations that run models."""
_WEIGHTS = ("*.safetensors", "*.gguf")


def check_lengths(model: Model, lengths: Sequence[int]) -> None:
    """Raise `WakefulError` if a prompt and its generated tokens exceed the model's context."""
    longest = max(lengths)
    if longest > longest_prompt(model.context):
        raise WakefulError(
            f"speed = {longest}: the prompt, the first token and {DECODED_TOKENS} after it are "
            f"more than {model.name}'s context of {model.context:,}"
        )


def measure_costs(model: Model, lengths: Sequence[int], *, progress: OnProgress) -> list[Score]:
    """Return the model's size, and its speed after prompts of these lengths.

    Size: parameters, megabytes of weights in memory and in files, kilobytes of cache per token, and
    megabytes of weights and cache together at the longest prompt. Speed, of one sequence: tokens
    per second of the prompt until the first new token (prefill) and of greedy tokens after it
    (decode), over `ROUNDS` rounds after an unmeasured one; the error is over rounds. Cache and
    speed depend on the implementation, `OURS` or `THEIRS`.

    Raises:
        WakefulError: a length that does not fit into the model's context.
    """
    check_lengths(model, lengths)
    prompts = {length: _random_prompt(model, length) for length in lengths}
    for prompt in prompts.values():
        _time_generation(model, prompt)
    seconds: dict[int, list[tuple[float, float]]] = {length: [] for length in lengths}
    for done in range(ROUNDS):
        progress(done, ROUNDS)
        for length, prompt in prompts.items():
            seconds[length].append(_time_generation(model, prompt))
    progress(ROUNDS, ROUNDS)
    keys = tuple(f"round {number}" for number in range(ROUNDS))
    code = code_of(model.module)
    speed: list[Score] = []
    for part, metric_name in ((0, "prefill of {:,}, tokens/s"), (1, "decode after {:,}, tokens/s")):
        for length in lengths:
            weights = np.array([timing[part] for timing in seconds[length]])
            tokens = np.full(ROUNDS, float((length, DECODED_TOKENS)[part]))
            speed.append(Score(model=model.name, task="speed", metric=metric_name.format(length),
                               keys=keys, values=tokens, weights=weights, is_cost=True,
                               implementation=code))  # fmt: skip
    return [*_measure_sizes(model, max(lengths)), *speed]


def code_of(module: nn.Module) -> str:
    """Return whose code runs a module; our class for Transformers holds our decoder."""
    return OURS if any(isinstance(part, Decoder) for part in module.modules()) else THEIRS


def _random_prompt(model: Model, length: int) -> list[int]:
    """Return random token ids, equal for models with vocabularies of 1,000 or more.

    Which tokens they are does not change the time.
    """
    decoder = as_decoder(model.module)
    table: Any = model.module.get_input_embeddings() if decoder is None else decoder.embed  # pyright: ignore[reportCallIssue]
    largest, generator = min(1000, table.num_embeddings), torch.Generator().manual_seed(0)
    return torch.randint(largest, (length,), generator=generator).tolist()


def _time_generation(model: Model, prompt: list[int]) -> tuple[float, float]:
    """Return the seconds to the first token, and from it to the last."""
    tokens = model.generate_ids(prompt, num_tokens=DECODED_TOKENS + 1, temperature=0.0)
    began = time.perf_counter()
    next(tokens)  # a token on the CPU: the device has finished it
    first = time.perf_counter()
    for _ in tokens:
        pass
    return first - began, time.perf_counter() - first


def _num_parameters(module: nn.Module) -> int:
    """Return the number of parameters, with quantized matrices, which are buffers."""
    matrices = sum(
        layer.in_features * layer.out_features + (0 if layer.bias is None else layer.bias.numel())
        for layer in module.modules()
        if isinstance(layer, QuantizedLinear)
    )
    return matrices + sum(layer.numel() for layer in module.parameters())


def _measure_sizes(model: Model, length: int) -> list[Score]:
    """Return parameters, bytes of weights and, where it can be measured, of the cache."""
    code = code_of(model.module)
    weights = held_bytes([*model.module.parameters(), *model.module.buffers()])
    cache = _cache_bytes(model, length)
    figures = {"parameters, M": _num_parameters(model.module) / 1e6, "weights, MB": weights / 1e6}
    if cache is not None:
        figures["cache, KB a token"] = cache / length / 1e3
        figures[f"weights and cache of {length:,} tokens, MB"] = (weights + cache) / 1e6
    files = _file_bytes(model)
    if files:
        figures["files, MB"] = files / 1e6
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
    """Return the bytes of the cache after a prompt: keys, values and states of linear attention.

    None where a layer's cache is of another kind.
    """
    own = as_decoder(model.module)
    if own is not None:
        return own.new_cache(1, length).num_bytes
    tokens = torch.tensor([_random_prompt(model, length)], device=model.device)
    past = model.module(input_ids=tokens, use_cache=True)[CACHE]
    held = [[vars(layer)[name] for name in _HELD if name in vars(layer)] for layer in past.layers]
    if not all(held):
        return None
    parts = [part for arrays in held for entry in arrays
             for part in (entry.values() if isinstance(entry, dict) else [entry])]  # fmt: skip
    return sum(part.nbytes for part in parts if isinstance(part, torch.Tensor))


def _file_bytes(model: Model) -> int:
    path = model.path
    if path is None:
        return 0
    if path.is_file():
        return path.stat().st_size
    checkpoint = Run(path).checkpoints / f"step-{model.step:08d}"
    if checkpoint.is_dir():  # beside the weights lies the optimizer's state
        files = checkpoint.glob("model*.safetensors")
    else:
        files = (file for kind in _WEIGHTS for file in path.glob(kind))
    return sum(file.stat().st_size for file in files)
