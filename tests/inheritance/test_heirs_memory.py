"""Memory that building an heir takes, counted tensor by tensor."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers import EXAMPLES, FIELD, tiny_config
from wakeful.config.model import ModelConfig
from wakeful.inheritance.blocks import departures, inherit_blocks
from wakeful.inheritance.layers import first
from wakeful.model.decoder import Decoder, without_matrices
from wakeful.model.initialize import fill, initialize


class Bytes(TorchDispatchMode):
    """Counts the bytes of storages that are made inside and still held, and their peak.

    Those of the model `given` are there already.
    """

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in decoder.state_dict().values()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.device.type == "cpu":
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._known:
            return
        self._known.add(address)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._drop, address, size)

    def _drop(self, address: int, size: int) -> None:
        self._known.discard(address)
        self.now -= size


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("folder", "expression"), EXAMPLES, ids=[e for _, e in EXAMPLES])
def test_matrices_made_later_are_those_made_at_once(
    folder: str, expression: str, tied: bool
) -> None:
    config = tiny_config(tied=tied, **{FIELD[folder]: expression})
    reference = initialize(Decoder(config), 3)
    with without_matrices():
        later = Decoder(config)
    left_out = {name for name, parameter in later.named_parameters() if parameter.is_meta}
    assert {"embed.weight", "blocks.0.attention.out.weight"} <= left_out
    fill(initialize(later, 3), 3)
    for (name, actual), (expected_name, expected) in zip(
        later.state_dict().items(), reference.state_dict().items(), strict=True
    ):
        assert name == expected_name
        assert torch.equal(actual, expected), name
    for (name, actual), (_, expected) in zip(
        later.named_buffers(), reference.named_buffers(), strict=True
    ):
        assert torch.equal(actual, expected), name
    assert (later.head.weight is later.embed.weight) == tied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_heir_takes_little_more_than_its_weights(dtype: torch.dtype) -> None:
    config = ModelConfig(
        num_layers=8, num_heads=4, width=64, mlp_width=192, vocab_size=256, max_length=32
    )
    reference = initialize(Decoder(config), 0).to(dtype)
    with Bytes(reference) as counted:
        heir = inherit_blocks(reference, first(6, of=8))
    weights = sum(p.numel() * p.element_size() for p in heir.parameters())
    assert counted.now >= weights  # the count sees what is there
    assert counted.peak <= 1.3 * weights
    with Bytes(reference) as counted:
        assert departures(reference, first(6, of=8), route="resformer")
    assert counted.peak <= 0.1 * weights
