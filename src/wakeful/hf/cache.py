"""Our cache as a `Cache` of Transformers, and visibility of tokens from a mask and positions."""

from dataclasses import fields
from typing import Any, SupportsInt

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import Cache as TransformersCache
from transformers.modeling_outputs import CausalLMOutputWithPast

from wakeful.errors import WakefulError
from wakeful.model.cache import Cache
from wakeful.tracing import is_readable

_FIELDS = {field.name for field in fields(CausalLMOutputWithPast)}
CACHE = "cache" if "cache" in _FIELDS else "past_key_values"
"""Name of the cache among Transformers' arguments and outputs, which changed in 5.24."""


class WakefulCache(TransformersCache):
    """Our cache as Transformers' `Cache`, which `generate()` grows, crops, reorders and copies.

    It wraps a `Cache`, which has a slot for each key or value that a layer owns and no others.
    """

    is_compileable = False  # pyright: ignore
    is_croppable = True  # pyright: ignore
    is_initialized = True  # pyright: ignore

    def __init__(self, slots: Cache) -> None:
        super().__init__(layers=[])
        self.slots = slots

    def __repr__(self) -> str:
        return f"WakefulCache({self.slots.length} tokens, {self.num_bytes} bytes)"

    @property
    def layers(self) -> "list[LayerView]":  # pyright: ignore[reportIncompatibleVariableOverride]
        """Read-only views of the layers' keys and values."""
        return [LayerView(self.slots, layer) for layer in range(self.slots.num_layers)]

    @layers.setter
    def layers(self, value: object) -> None: ...  # Transformers sets a list of its own

    @property
    def is_linear(self) -> list[bool]:
        """False for every layer: none has a recurrent state. `generate()` reads this."""
        return [False]

    @property
    def num_bytes(self) -> int:
        """Bytes allocated."""
        return self.slots.num_bytes

    @property
    def batch_size(self) -> int:
        return self.slots.batch_size

    max_batch_size = batch_size  # pyright: ignore[reportAssignmentType]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.slots.length

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        return -1

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.slots.length + query_length, 0

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise WakefulError("a WakefulCache is filled by a Wakeful model and by no other")

    def reset(self) -> None:
        self.slots.crop(0)

    def crop(self, tokens_to_remove: SupportsInt) -> None:
        """Crop the cache by the argument n: drop the last −n tokens for n < 0, keep the first n for
        n > 0, and do nothing for n = 0 or where there are no more than n.
        """
        count = int(tokens_to_remove)  # older Transformers give a tensor
        if count < 0 or 0 < count < self.slots.length:
            self.slots.crop(count)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.slots.reorder(indices)

    reorder_cache = batch_select_indices  # pyright: ignore[reportAssignmentType]

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.slots.reorder(torch.arange(self.batch_size).repeat_interleave(repeats))


class LayerView:
    """The keys and values (B, G, S, d) of one layer; G is 0 where it shares another layer's."""

    def __init__(self, slots: Cache, layer: int) -> None:
        self.slots, self.layer = slots, layer

    @property
    def keys(self) -> Tensor:
        return self.slots.owned(("keys", self.layer)).transpose(1, 2)

    @property
    def values(self) -> Tensor:
        return self.slots.owned(("values", self.layer)).transpose(1, 2)

    def get_seq_length(self) -> int:
        return self.slots.length


Visible = tuple[Bool[Tensor, "B S"] | None, Int[Tensor, "B L"] | None, Int[Tensor, "B L"] | None]
"""`valid` (real tokens), `places` (positions) and `documents` (numbers of packed texts) as
`Decoder.stream` takes them; all None for an ordinary causal mask over consecutive positions."""


def token_visibility(
    mask: Tensor | None, positions: Tensor | None, start: int, x: Tensor
) -> Visible:
    """Convert Transformers' attention mask (B, S) and position ids (1 or B, L) of new tokens
    x (B, L, D) to the arguments of our decoder: return which tokens are real (B, S), positions
    (B, L) and numbers of packed texts (B, L), each None where the decoder's default is the same.

    `start` tokens precede x in the cache; S = start + L. While a graph is traced, values cannot be
    read (`is_readable`), and tensors are returned even where None would be the same.

    Raises:
        WakefulError: the mask has another shape.
    """
    batch, length = x.shape[:2]
    end = start + length
    if mask is not None and mask.shape != (batch, end):
        raise WakefulError(
            f"attention_mask must mark the real ones of {end} tokens, shape {(batch, end)}, "
            f"and has shape {tuple(mask.shape)}"
        )
    valid = None if mask is None else mask != 0
    if valid is not None and is_readable(valid) and bool(valid.all()):  # it hides nothing
        valid = None
    if positions is None:
        return valid, None, None
    positions = positions.expand(batch, length)
    if valid is None and is_readable(positions):
        default_positions = torch.arange(start, end, device=x.device).expand(batch, length)
        if torch.equal(positions, default_positions):
            return None, None, None
    # Rows hold several packed texts only where Transformers gives neither a mask nor a cache.
    if mask is not None or start:
        return valid, positions, None
    return None, positions, _number_packed_texts(positions)


def _number_packed_texts(positions: Int[Tensor, "B L"]) -> Int[Tensor, "B L"] | None:
    """Return for each token the number of its text in the row, from 0: positions restart where the
    next text starts. Return None if every row holds a single text.
    """
    # True where a position is not the previous one plus 1; False at the first token.
    starts = positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1
    numbers = starts.long().cumsum(1)
    if is_readable(numbers) and not bool(numbers.any()):
        return None
    return numbers
