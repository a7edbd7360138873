"""Scaled embeddings, capped logits, other divisors of queries and gated GELU."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from helpers import EIGHT_BITS, some_tokens, tiny_config, tiny_decoder, with_eight_bits
from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError
from wakeful.hf import as_transformers
from wakeful.model.decoder import Decoder
from wakeful.model.generate import generate_tokens
from wakeful.probes.running import logits_of
from wakeful.quantization import quantize_module, quantized_layers
from wakeful.quantization.linear import QuantizedLinear
from wakeful.surgery import rotate, store_prefix

TOKENS = some_tokens(2, 11)
ALL: dict[str, Any] = {
    "embedding": "scaled", "logit_cap": 3.0, "query_scalar": 5, "mlp": "geglu",
    "normalizer": "softcap(cap=2.0)",
}  # fmt: skip


@pytest.mark.slow
@torch.no_grad()
def test_each_by_its_definition() -> None:
    plain = tiny_decoder()
    capped = tiny_decoder(logit_cap=3.0)
    assert_close(capped(TOKENS), 3 * torch.tanh(plain(TOKENS) / 3))
    assert capped(TOKENS).abs().max() < 3
    longer = tiny_decoder(embedding="scaled")
    assert_close(longer(TOKENS), plain.head(plain.stream(plain.embed(TOKENS) * 4)))
    # Queries half as long, divided by half as much.
    short = tiny_decoder(query_scalar=2)
    for block in short.blocks:
        block.attention.query.weight.mul_(0.5)
    assert_close(short(TOKENS), plain(TOKENS))
    mlp = tiny_decoder(mlp="geglu").blocks[0].mlp
    x = torch.randn(3, 16, dtype=torch.float64)
    gate, up = x @ mlp.gate.weight.T, x @ mlp.up.weight.T
    assert_close(mlp(x), (F.gelu(gate, approximate="tanh") * up) @ mlp.down.weight.T)


@pytest.mark.slow
@torch.no_grad()
def test_all_of_them_wherever_logits_are_made() -> None:
    decoder = tiny_decoder(**ALL).eval()
    whole = decoder(TOKENS)
    cache = decoder.new_cache(2, 11)
    pieces = [decoder(piece, cache=cache) for piece in TOKENS.split([5, 1, 5], 1)]
    assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-12)
    assert_close(logits_of(decoder, TOKENS), whole)
    model = as_transformers(decoder)
    assert_close(model(TOKENS).logits, whole)
    prompt = TOKENS[:1]
    theirs = model.generate(prompt, max_new_tokens=5, do_sample=False, pad_token_id=0)
    ours = list(generate_tokens(decoder, prompt[0].tolist(), num_tokens=5, temperature=0))
    assert theirs[0, 11:].tolist() == ours
    first = torch.full((2, 1), 7)
    longer = decoder(torch.cat([first, TOKENS], 1))[:, 1:]
    assert_close(store_prefix(decoder, [7])(TOKENS), longer)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_a_rotation_leaves_the_function(tied: bool) -> None:
    decoder = tiny_decoder(**ALL, tied=tied)
    turned = rotate(decoder)
    assert not torch.allclose(turned.embed.weight, decoder.embed.weight)
    assert_close(turned(TOKENS), decoder(TOKENS))


@torch.no_grad()
def test_a_quantized_head_is_capped() -> None:
    decoder = tiny_decoder(**ALL, dtype=torch.float32).eval()
    small = quantize_module(decoder, EIGHT_BITS)
    assert isinstance(small.head, QuantizedLinear)
    wanted = with_eight_bits(decoder, quantized_layers(small))(TOKENS)
    assert_close(small(TOKENS), wanted)
    assert 1 < wanted.abs().max() < 3
    assert_close(logits_of(small, TOKENS), wanted)


def num_parameters(**changes: str) -> int:
    return Decoder(tiny_config(**changes)).num_parameters()["total"]


def test_parameters_and_old_descriptions() -> None:
    gated, plain = (num_parameters(mlp=name) for name in ("geglu", "gelu"))
    assert gated - plain == 4 * 16 * 20
    assert gated == num_parameters()
    for name in ("logit_cap", "query_scalar"):
        with pytest.raises(WakefulError, match=f"model.{name} must not be negative"):
            ModelConfig(**{name: -1})
