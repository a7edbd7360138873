"""LayerNorm scaling: what it does, and that an export is a stock Llama without it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from helpers import some_tokens, tiny_decoder
from wakeful.data.tokenizer import Tokenizer
from wakeful.hf.weights_out import export_decoder
from wakeful.loading.load import read_decoder
from wakeful.model.fold import folded
from wakeful.norms import Norm
from wakeful.quantization import quantize_module
from wakeful.surgery import rotate

SCALED = "layernorm_scaling"


@torch.no_grad()
@pytest.mark.parametrize("placement", ["pre", "post", "peri"])
def test_a_layers_norms_are_smaller_by_the_root_of_its_number(placement: str) -> None:
    scaled = tiny_decoder(norm=SCALED, placement=placement)
    plain = tiny_decoder(placement=placement)
    for norm in plain.modules():
        if isinstance(norm, Norm) and norm.spec.part != "final":
            norm.weight.mul_((norm.spec.layer + 1) ** -0.5)
    tokens = some_tokens(2, 9)
    torch.testing.assert_close(scaled(tokens), plain(tokens), rtol=0, atol=1e-12)


def test_norms_of_queries_and_keys_are_as_they_were() -> None:
    names = {
        type(norm).__name__
        for norm in tiny_decoder(norm=SCALED, qk_norm=True).modules()
        if isinstance(norm, Norm) and norm.spec.part in ("query", "key")
    }
    assert names == {"RMSNorm"}


@torch.no_grad()
def test_folded_it_is_a_plain_rmsnorm() -> None:
    decoder = tiny_decoder(norm=SCALED, tied=True, placement="peri")
    before = {name: tensor.clone() for name, tensor in decoder.state_dict().items()}
    plain = folded(decoder)
    assert plain.config.norm == "rmsnorm"
    tokens = some_tokens(2, 9)
    torch.testing.assert_close(plain(tokens), decoder(tokens), rtol=0, atol=1e-12)
    assert all(torch.equal(before[name], now) for name, now in decoder.state_dict().items())
    assert plain.embed.weight is decoder.embed.weight
    assert folded(plain) is plain


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_an_export_is_a_stock_llama(tied: bool, tmp_path: Path) -> None:
    decoder = tiny_decoder(dtype=torch.float32, vocab_size=270, norm=SCALED, tied=tied).eval()
    tokenizer = Tokenizer.train(["def f(x):\n    return x + 1\n"] * 5, 270)
    assert export_decoder(decoder, tmp_path / "out", tokenizer=tokenizer) == "llama"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    again = read_decoder(tmp_path / "out").decoder()
    assert again.config.norm == "rmsnorm"
    tokens = some_tokens(2, 9)
    torch.testing.assert_close(theirs(tokens).logits, decoder(tokens), rtol=0, atol=3e-5)
    torch.testing.assert_close(again(tokens), decoder(tokens), rtol=0, atol=3e-5)


@torch.no_grad()
def test_it_rotates_and_is_quantized() -> None:
    decoder = tiny_decoder(norm=SCALED).eval()
    tokens = some_tokens(2, 9)
    torch.testing.assert_close(rotate(decoder)(tokens), decoder(tokens), rtol=1e-9, atol=1e-9)
    small = quantize_module(decoder.float(), "fine")
    wanted = decoder(tokens)
    assert (small(tokens) - wanted).norm() / wanted.norm() < 0.1
    assert small.config.norm == "rmsnorm"
    assert decoder.config.norm == SCALED
