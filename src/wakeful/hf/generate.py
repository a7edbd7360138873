"""Continuing a text with a Transformers model, one token at a time."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from wakeful.model.generate import continuation


def generate_transformers(
    model: PreTrainedModel, prompt: list[int], *, context: int, **choice: Any
) -> Iterator[int]:
    """Return up to `num_tokens` token ids that continue `prompt`, as `model.generate.generate`.

    The model keeps its own key/value cache. `choice` holds num_tokens, temperature, top_k, top_p,
    seed and stop.
    """
    past = None

    def step(tokens: Tensor) -> Tensor:
        nonlocal past
        output = model(input_ids=tokens, past_key_values=past, use_cache=True)
        past = output.past_key_values
        return output.logits[0, -1]

    return continuation(step, prompt, device=model.device, context=context, **choice)
