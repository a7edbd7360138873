"""The loss against its definition."""

import pytest
import torch

from helpers import exact_loss, some_tokens, tiny_decoder
from wakeful.model.decoder import IGNORED, cross_entropy


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_is_the_negative_log_probability(reduction: str) -> None:
    hidden = torch.randn(2, 7, 5, dtype=torch.float64)
    weight = torch.randn(11, 5, dtype=torch.float64)
    targets = torch.randint(11, (2, 7))
    targets[0, 3] = targets[1, 6] = IGNORED
    probabilities = torch.softmax(hidden @ weight.T, -1)
    each = -probabilities.gather(2, targets.clamp_min(0).unsqueeze(2)).squeeze(2).log()
    each = each * (targets != IGNORED)
    expected = {"mean": each.sum() / 12, "sum": each.sum(), "none": each}[reduction]
    loss = cross_entropy(hidden @ weight.T, targets, reduction=reduction)
    torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)


def test_the_decoder_keeps_its_own_precision() -> None:
    decoder, tokens = tiny_decoder(), some_tokens(2, 9)
    loss = decoder.loss(tokens[:, :-1], tokens[:, 1:])
    assert loss.dtype == torch.float64
    torch.testing.assert_close(loss, exact_loss(decoder, tokens), rtol=1e-13, atol=1e-13)
    assert tiny_decoder(dtype=torch.bfloat16).loss(tokens, tokens).dtype == torch.float32
