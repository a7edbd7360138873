"""The key/value cache: one slot for each layer that owns a key or a value, and none for others."""

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.variants.shape import Shape

Slot = tuple[Literal["keys", "values"], int]


class Cache:
    """Keys and values of the tokens so far, a slot for each layer's; a slot has the shape
    (B, G, prefix_length + capacity, d).

    A slot is allocated on the device of the first heads stored in it: the layers of a model may lie
    on several devices. The first `prefix_length` tokens are a stored prefix. Stored are the tensors
    that attention reads: rotated keys, and values after the route's mixing. A layer that borrows
    another layer's values has no slot, so SVFormer's cache is (N+1)/2N of vanilla's.
    """

    def __init__(
        self,
        slots: list[Slot],
        shape: Shape,
        *,
        batch_size: int,
        capacity: int,
        dtype: torch.dtype,
        prefix_length: int = 0,
    ) -> None:
        """Make empty slots for `batch_size` sequences, each with a stored prefix of `prefix_length`
        tokens and up to `capacity` tokens of text.
        """
        self._tensors: dict[Slot, Tensor | None] = dict.fromkeys(slots)
        self._dtype = dtype
        self._heads, self._width = shape.num_kv_heads, shape.head_width
        self.num_layers = shape.num_layers
        self.batch_size = batch_size
        """Sequences stored side by side."""
        self.capacity = capacity
        """Number of tokens of text that fit."""
        self.length = 0
        """Tokens of text stored."""
        self.prefix_length = prefix_length
        """Number of tokens of the stored prefix, which come before the text's."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all slots together, each allocated in full with its first token."""
        return len(self._tensors) * math.prod(self._size) * self._dtype.itemsize

    @property
    def _size(self) -> tuple[int, int, int, int]:
        """The shape of a slot."""
        return self.batch_size, self._heads, self.prefix_length + self.capacity, self._width

    def extend(
        self,
        slot: Slot,
        new: Float[Tensor, "B L G d"],
        prefix: Float[Tensor, "P G d"] | None = None,
    ) -> Float[Tensor, "B S G d"]:
        """Store the new tokens' keys or values in a slot; return those of all tokens so far, the
        stored prefix's first.

        The first call for a slot allocates it, and the `prefix` is written with the first tokens.
        The new tokens are not counted yet: `advance` does that when every slot has them.

        Raises:
            WakefulError: the tokens are more than the cache's capacity.
        """
        end = self.length + new.shape[1]
        if end > self.capacity:
            raise WakefulError(
                f"the cache holds {self.capacity} tokens, and {end} are needed; make it longer"
            )
        tensor = self._tensors[slot]
        if tensor is None:
            tensor = self._tensors[slot] = new.new_empty(self._size, dtype=self._dtype)
        if prefix is not None and self.length == 0:  # these are the first tokens
            tensor[:, :, : self.prefix_length] = prefix.transpose(0, 1)
        heads = tensor[:, :, : self.prefix_length + end]
        heads[:, :, self.prefix_length + self.length :] = new.transpose(1, 2)
        return heads.transpose(1, 2)

    def read(self, slot: Slot) -> Float[Tensor, "B S G d"]:
        """Return the keys or values in a slot for the text so far, without the stored prefix's."""
        end = self.prefix_length + self.length
        tensor = self._tensors[slot]
        assert tensor is not None  # `extend` comes first
        return tensor[:, :, self.prefix_length : end].transpose(1, 2)

    def owned(self, slot: Slot) -> Float[Tensor, "B S G d"]:
        """Return what `read` does, or a tensor without heads (G = 0) if the cache lacks the slot or
        nothing is stored in it, as for a layer that borrows its keys or values.
        """
        if self._tensors.get(slot) is None:
            return torch.empty(self.batch_size, self.length, 0, self._width, dtype=self._dtype)
        return self.read(slot)

    def reserve(self, capacity: int) -> None:
        """Make room for `capacity` tokens of text; do nothing if there is as much.

        The slots are copied into larger ones, of at least twice the capacity, so that a text that
        grows is not copied often.
        """
        if capacity <= self.capacity:
            return
        self.capacity = max(capacity, 2 * self.capacity)
        for slot, tensor in self._tensors.items():
            self._tensors[slot] = self._copy(tensor, self.capacity)

    def advance(self, num_tokens: int) -> None:
        """Count tokens that every slot now holds."""
        self.length += num_tokens

    def crop(self, length: int) -> None:
        """Forget all but the first `length` tokens; a negative length drops the last −length.

        Raises:
            WakefulError: the cache has fewer tokens.
        """
        new_length = self.length + length if length < 0 else length
        if not 0 <= new_length <= self.length:
            raise WakefulError(f"cannot crop a cache of {self.length} tokens to {length}")
        self.length = new_length

    def reorder(self, rows: Tensor) -> None:
        """Replace sequence i by sequence `rows[i]`, as beam search does.

        `batch_size` becomes the length of `rows`, which may be more or fewer than before.
        """
        self.batch_size = len(rows)
        for slot, tensor in self._tensors.items():
            self._tensors[slot] = self._copy(tensor, self.capacity, rows)

    def _copy(
        self, tensor: Tensor | None, capacity: int, rows: Tensor | None = None
    ) -> Tensor | None:
        """Return a copy of a slot's tensor with room for `capacity` tokens of text; None for a slot
        that is not allocated yet.

        The copy has all sequences, or those whose numbers are in `rows`, in that order.
        """
        if tensor is None:
            return None
        end = self.prefix_length + self.length
        stored = tensor[:, :, :end]
        if rows is not None:
            stored = stored[rows.to(tensor.device)]
        batch, heads, _, width = stored.shape
        new = tensor.new_empty((batch, heads, self.prefix_length + capacity, width))
        new[:, :, :end] = stored
        return new
