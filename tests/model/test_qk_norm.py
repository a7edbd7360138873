"""Norms of queries and keys: of each head, or of all heads of a token together."""

import pytest
import torch
from torch.testing import assert_close

from helpers import EIGHT_BITS, some_tokens, tiny_config, tiny_decoder, with_eight_bits
from wakeful.errors import WakefulError
from wakeful.hf import as_transformers
from wakeful.quantization import quantize_module, quantized_layers

TOKENS = some_tokens(2, 11)
WHOLE = {"qk_norm": True, "qk_norm_whole": True}


@pytest.mark.slow
@torch.no_grad()
def test_all_heads_are_normalized_together() -> None:
    decoder = tiny_decoder(**WHOLE)
    seen = {}
    attention = decoder.blocks[1].attention
    attention.dot.register_forward_pre_hook(lambda _, args: seen.update(q=args[0], k=args[1]))
    attention.query.register_forward_pre_hook(lambda _, args: seen.update(x=args[0]))
    whole = decoder(TOKENS)
    for name, part, heads in (("q", attention.query, 4), ("k", attention.key, 2)):
        assert part.norm.weight.shape == (heads * 8,)
        rows = seen["x"] @ part.weight.T
        rows = rows / (rows.square().mean(-1, keepdim=True) + 1e-5).sqrt() * part.norm.weight
        # RoPE turns pairs of channels and changes no length.
        wanted = rows.unflatten(-1, (heads, 8)).unflatten(-1, (2, 4)).norm(dim=-2)
        assert_close(seen[name].unflatten(-1, (2, 4)).norm(dim=-2), wanted)
    cache = decoder.new_cache(2, 11)
    pieces = [decoder(piece, cache=cache) for piece in TOKENS.split([5, 1, 5], 1)]
    assert_close(torch.cat(pieces, 1), whole, rtol=0, atol=1e-12)
    assert not torch.allclose(tiny_decoder(qk_norm=True)(TOKENS), whole)


@pytest.mark.slow
@torch.no_grad()
def test_other_projections_into_heads_do_the_same() -> None:
    decoder = tiny_decoder(**WHOLE).eval()
    wanted = decoder(TOKENS)
    assert_close(as_transformers(decoder)(TOKENS).logits, wanted)
    narrow = tiny_decoder(**WHOLE, dtype=torch.float32).eval()
    small = quantize_module(narrow, EIGHT_BITS)
    assert_close(small(TOKENS), with_eight_bits(narrow, quantized_layers(small))(TOKENS))


def test_what_is_refused() -> None:
    with pytest.raises(WakefulError, match=r"qk_norm_whole needs model\.qk_norm: turn it on too"):
        tiny_config(qk_norm_whole=True)
