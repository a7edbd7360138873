"""Softmax of capped logits."""

import math

import pytest
import torch
from torch.testing import assert_close

from helpers import some_tokens, tiny_decoder
from wakeful.errors import WakefulError
from wakeful.normalizers import Softcap


def test_it_is_the_softmax_of_capped_logits() -> None:
    logits = torch.randn(2, 3, 5, 5, dtype=torch.float64) * 9
    hidden = ~torch.ones(5, 5, dtype=torch.bool).tril()
    weights = Softcap(cap=2.0).weights(logits.masked_fill(hidden, -torch.inf))
    for row in range(5):
        seen = [2 * math.tanh(x / 2) for x in logits[1, 2, row, : row + 1].tolist()]
        total = sum(map(math.exp, seen))
        wanted = [math.exp(x) / total for x in seen] + [0.0] * (4 - row)
        assert_close(weights[1, 2, row], torch.tensor(wanted, dtype=torch.float64))


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
