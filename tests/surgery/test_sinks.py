"""Learned sinks and gates start as the model after a stored token, open gates as it is."""

from typing import cast

import pytest
import torch
from torch import Tensor

from surgery.test_prefix import decoder, text
from wakeful.errors import WakefulError
from wakeful.model.block import Block
from wakeful.model.decoder import Decoder
from wakeful.surgery import learned_sinks, store_prefix


def sinks_of(decoder: Decoder) -> Tensor:
    named = decoder.named_parameters()
    return torch.stack([sinks for name, sinks in named if name.endswith("log_sinks")])


@pytest.mark.parametrize("positions", ["learned", "none"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_without_rope_sinks_are_exact(positions: str, bias: bool, kv_heads: int) -> None:
    plain = decoder(positions=positions, bias=bias, num_kv_heads=kv_heads)
    before = {name: tensor.clone() for name, tensor in plain.state_dict().items()}
    cured = learned_sinks(plain, 5, text(rows=3))
    expected = store_prefix(plain, [5])(text(length=9))
    torch.testing.assert_close(cured(text(length=9)), expected, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(sinks_of(cured), torch.zeros(4, 4).double(), rtol=0, atol=1e-9)
    assert cured.config.context == plain.config.context - 1
    assert all(torch.equal(before[name], now) for name, now in plain.state_dict().items())


def test_slow_channels_are_exact_too() -> None:
    """With RoPE so slow that no channel turns within the text, as without it."""
    plain = decoder(rope="linear(factor=1e12)")
    cured = learned_sinks(plain, 5, text())
    torch.testing.assert_close(cured(text()), store_prefix(plain, [5])(text()), rtol=0, atol=1e-6)


@pytest.mark.parametrize("changes", [{}, {"qk_norm": True}, {"rotary_width": 2}])
def test_sinks_have_the_weight_that_the_token_had(changes: dict) -> None:
    """Layer by layer, in the mean over queries, on the same inputs."""
    plain = decoder(**changes)
    prefixed, tokens = store_prefix(plain, [5]), text(rows=3)
    cured = learned_sinks(plain, 5, tokens)
    theirs, ours = first_inputs(prefixed, tokens), first_inputs(cured, tokens)
    q, k, scale = theirs
    logits = torch.einsum("blhd,bshd->bhls", q, k.repeat_interleave(2, 2)) * scale
    later = torch.ones(11, 12).triu(2).bool()
    weight = logits.masked_fill(later, -torch.inf).softmax(-1)[..., 0].mean((0, 2))
    q, k, scale = ours
    logits = torch.einsum("blhd,bshd->bhls", q, k.repeat_interleave(2, 2)) * scale
    logits = logits.masked_fill(torch.ones(11, 11).triu(1).bool(), -torch.inf)
    sink = sinks_of(cured)[0].view(1, 4, 1, 1).expand(3, 4, 11, 1)
    found = torch.cat([sink, logits], -1).softmax(-1)[..., 0].mean((0, 2))
    torch.testing.assert_close(found, weight, rtol=1e-6, atol=0)


def first_inputs(decoder: Decoder, tokens: Tensor) -> tuple[Tensor, Tensor, float]:
    """Return the queries and keys that the first layer attends with, and its scale."""
    dot, found = cast(Block, decoder.blocks[0]).attention.dot, list[Tensor]()
    with dot.register_forward_pre_hook(lambda _, heads: found.extend(heads)):
        decoder(tokens)
    return found[0], found[1], dot.scale


def test_sinks_come_nearer_than_nothing() -> None:
    torch.manual_seed(0)
    plain = decoder(rope_theta=1e6, head_width=16)
    prefixed, tokens = store_prefix(plain, [5]), text(rows=4)
    expected = prefixed(tokens)
    far = (plain(tokens) - expected).square().mean()
    assert (learned_sinks(plain, 5, tokens)(tokens) - expected).square().mean() < far / 2


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"normalizer": "softmax1"}, "normalizer"),
        ({"route": "resformer"}, "route"),
        ({"stored_prefix": 2}, "stored_prefix"),
    ],
)
def test_sinks_are_refused(changes: dict, word: str) -> None:
    with pytest.raises(WakefulError, match=word):
        learned_sinks(decoder(**changes), 5, text())


def test_a_token_that_is_none_is_refused() -> None:
    with pytest.raises(WakefulError, match="vocabulary"):
        learned_sinks(decoder(), 61, text())
