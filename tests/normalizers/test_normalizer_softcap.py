"""Softmax of capped logits."""

import pytest
import torch
from torch.testing import assert_close

from helpers import some_tokens, tiny_decoder
from wakeful.errors import WakefulError
from wakeful.normalizers import Softcap


def test_its_gradients_are_finite_beside_masked_logits() -> None:
    tokens = some_tokens(2, 7)
    decoder = tiny_decoder(normalizer="softcap(cap=1.0)")
    decoder(tokens).square().sum().backward()
    gradient = decoder.blocks[0].attention.query.weight.grad
    assert torch.isfinite(gradient).all()
    assert gradient.abs().max() > 0


@torch.no_grad()
def test_a_cap_far_above_every_logit_is_none() -> None:
    tokens = some_tokens(2, 7)
    assert_close(tiny_decoder(normalizer="softcap(cap=1e9)")(tokens), tiny_decoder()(tokens))


def test_a_cap_is_positive() -> None:
    with pytest.raises(WakefulError, match="cap must be positive, got 0"):
        Softcap(cap=0.0)
