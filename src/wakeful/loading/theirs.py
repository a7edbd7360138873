"""A model of Transformers that is read on token by token, with the cache that is its own."""

import inspect
from collections.abc import Sequence
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.hf.cache import CACHE


class TheirForward:
    """Gives the logits of the last token of `rows` sequences, and keeps the cache from one call to
    the next. Caches of Transformers are of many kinds: no row is taken out of them.
    """

    def __init__(self, module: nn.Module, rows: int = 1) -> None:
        known, older = inspect.signature(module.forward).parameters, "past_key_values"
        self._module = module
        # Code beside weights may know the older name alone.
        self._name = older if older in known and CACHE not in known else CACHE
        # Only the last token's logits are wanted, and the head is the widest matrix.
        self._last = {"logits_to_keep": 1} if "logits_to_keep" in known else {}
        self._size, self._rows = rows, list(range(rows))
        self._began, self._cache = False, None

    def __call__(
        self, tokens: Int[Tensor, "B L"], rows: Sequence[int] = ()
    ) -> Float[Tensor, "B V"]:
        """Return the logits after tokens that go on from the step before, or from `rows` of it.

        Raises:
            WakefulError: the model returned no cache in the step before.
        """
        if self._began and self._cache is None:
            raise WakefulError(
                f"the {type(self._module).__name__} keeps no cache of keys and values, and "
                "generating without one takes too long: choose another model"
            )
        self._rows = [self._rows[row] for row in rows] if rows else self._rows
        whole = tokens.new_zeros((self._size, tokens.shape[1]))
        whole[self._rows] = tokens
        cache: dict[str, Any] = {self._name: self._cache}
        output = self._module(input_ids=whole, use_cache=True, **cache, **self._last)
        self._began, self._cache = True, output.get(CACHE)
        return output.logits[self._rows, -1]
