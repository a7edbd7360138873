"""Token-by-token forward of a Transformers model with its own cache."""

import inspect
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.hf.cache import CACHE


class HFForward:
    """Forward pass of a Transformers model that returns the last token's logits and keeps the cache
    between calls.
    """

    def __init__(self, module: nn.Module) -> None:
        """Find out which arguments the model's `forward` takes, and begin without a cache."""
        parameters = inspect.signature(module.forward).parameters
        self._module = module
        # Remote code may know only the older name of the cache argument.
        has_older_name = "past_key_values" in parameters and CACHE not in parameters
        self._cache_argument = "past_key_values" if has_older_name else CACHE
        # Where possible, ask for the last token's logits only: the head is the largest matrix.
        self._options = {"logits_to_keep": 1} if "logits_to_keep" in parameters else {}
        self._was_called, self._cache = False, None

    def __call__(self, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B V"]:
        """Return the logits after the last of `tokens`, which continue the tokens of the calls
        before.

        Raises:
            WakefulError: the model returned no cache in the previous call, so it cannot continue.
        """
        if self._was_called and self._cache is None:
            raise WakefulError(
                f"the {type(self._module).__name__} keeps no cache of keys and values, and "
                "generating without one takes too long: choose another model"
            )
        cache: dict[str, Any] = {self._cache_argument: self._cache}
        output = self._module(input_ids=tokens, use_cache=True, **cache, **self._options)
        self._was_called, self._cache = True, output.get(CACHE)
        return output.logits[:, -1]
