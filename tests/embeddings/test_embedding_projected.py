"""Embedding projections: what they compute, how they start, and that they fold into the tables."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM

from helpers import some_tokens, tiny_config, tiny_decoder
from hf.models import padded, pair
from wakeful.config.model import ModelConfig
from wakeful.config.tables import from_table
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.weights_out import export_decoder
from wakeful.inheritance.blocks import inherit_blocks
from wakeful.inheritance.layers import first
from wakeful.loading.load import read_decoder
from wakeful.model.decoder import Decoder
from wakeful.model.fold import folded
from wakeful.quantization import quantize_module, quantized_layers
from wakeful.surgery import rotate

PROJECTED = {"embedding": "projected"}


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_it_is_its_definition(tied: bool, positions: str) -> None:
    decoder = tiny_decoder(**PROJECTED, tied=tied, positions=positions)
    plain = tiny_decoder(tied=tied, positions=positions)
    plain.load_state_dict({name: decoder.get_parameter(name) for name in plain.state_dict()})
    tokens = some_tokens(2, 9)
    rows = decoder.embed.weight[tokens] @ decoder.get_parameter("embedding.first.weight").T
    read = plain.stream(rows) @ decoder.get_parameter("embedding.last.weight").T
    torch.testing.assert_close(decoder(tokens), F.linear(read, plain.head.weight))


def test_matrices_start_orthogonal_and_apart() -> None:
    decoder = tiny_decoder(**PROJECTED, noise=0)
    found = [decoder.get_parameter(f"embedding.{part}.weight") for part in ("first", "last")]
    for matrix in found:
        torch.testing.assert_close(matrix @ matrix.T, torch.eye(16).double(), rtol=0, atol=1e-6)
    assert not torch.allclose(*found)
    other = tiny_decoder(**PROJECTED, noise=0, seed=1)
    assert not torch.allclose(other.get_parameter("embedding.first.weight"), found[0])


def test_a_description_without_the_field_is_the_vanilla_one() -> None:
    assert from_table(ModelConfig, {"num_layers": 2}).embedding == "plain"
    assert "embedding" not in str(Decoder(tiny_config()).state_dict().keys())


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_folded_it_is_a_plain_decoder(tied: bool) -> None:
    decoder = tiny_decoder(**PROJECTED, tied=tied, route="resformer", norm="layernorm")
    plain = folded(decoder)
    assert (plain.config.embedding, plain.config.tied) == ("plain", False)
    tokens = some_tokens(2, 9)
    torch.testing.assert_close(plain(tokens), decoder(tokens), rtol=0, atol=1e-11)


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_an_export_is_a_stock_llama(tied: bool, tmp_path: Path) -> None:
    recipe = PROJECTED | {"norm": "rmsnorm_single", "tied": tied}
    decoder = tiny_decoder(dtype=torch.float32, vocab_size=270, **recipe).eval()
    tokenizer = Tokenizer.train(["def f(x):\n    return x + 1\n"] * 5, 270)
    assert export_decoder(decoder, tmp_path / "out", tokenizer=tokenizer) == "llama"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = some_tokens(2, 9)
    wanted = decoder(tokens)
    torch.testing.assert_close(theirs(tokens).logits, wanted, rtol=1e-5, atol=1e-4)
    again = read_decoder(tmp_path / "out").decoder()
    torch.testing.assert_close(again(tokens), wanted, rtol=1e-5, atol=1e-4)


@torch.no_grad()
def test_it_runs_in_transformers() -> None:
    decoder, model = pair(**PROJECTED)
    tokens, mask = padded(some_tokens(3, 11), 11, 7, 2)
    logits = model(tokens, attention_mask=mask).logits
    for row, length in enumerate((11, 7, 2)):
        alone = decoder(tokens[row : row + 1, 11 - length :])[0]
        torch.testing.assert_close(logits[row, 11 - length :], alone, rtol=0, atol=1e-12)


@torch.no_grad()
@pytest.mark.parametrize("tied", [False, True])
def test_it_is_rotated_and_quantized_as_what_it_folds_to(tied: bool) -> None:
    decoder = tiny_decoder(**PROJECTED, tied=tied).eval()
    tokens = some_tokens(2, 9)
    wanted = decoder(tokens)
    torch.testing.assert_close(rotate(decoder)(tokens), wanted, rtol=1e-9, atol=1e-9)
    small = quantize_module(decoder.float(), "fine")
    assert "head" in quantized_layers(small)
    assert not any(name.startswith("embedding") for name in quantized_layers(small))
    assert (small(tokens) - wanted).norm() / wanted.norm() < 0.1


def test_heirs_keep_it() -> None:
    reference = tiny_decoder(**PROJECTED)
    heir = inherit_blocks(reference, first(2, of=4))
    cut = tiny_decoder(**PROJECTED)
    cut.blocks = nn.ModuleList(list(cut.blocks)[:2])
    assert torch.equal(heir(some_tokens(2, 9)), cut(some_tokens(2, 9)))


def test_an_unknown_embedding_is_refused_by_name() -> None:
    with pytest.raises(WakefulError, match=r"unknown embedding 'projectd'.*'projected'"):
        Decoder(tiny_config(embedding="projectd"))
