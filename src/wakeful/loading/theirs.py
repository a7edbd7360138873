"""A model of Transformers that is read on token by token, with the cache that is its own."""

import inspect
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from wakeful.hf.cache import CACHE


class TheirForward:
    """Gives the logits of the last token, and keeps the cache from one call to the next."""

    def __init__(self, module: nn.Module) -> None:
        known, older = inspect.signature(module.forward).parameters, "past_key_values"
        self._module = module
        # Code beside weights may know the older name alone.
        self._name = older if older in known and CACHE not in known else CACHE
        # Only the last token's logits are wanted, and the head is the widest matrix.
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self.cache: Any = None
        """What the model returned as its cache: None before the first call, or if it keeps none."""

    def __call__(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B V"]:
        output = self._module(
            input_ids=tokens, use_cache=True, **{self._name: self.cache}, **self._last
        )
        self.cache = output.get(CACHE)
        return output.logits[:, -1]
