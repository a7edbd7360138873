"""What `quantize --save` accepts can be read back: grids from outside the package too."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import wakeful
from wakeful.data.tokenizer import Tokenizer
from wakeful.quant.convert import quantized_layers
from wakeful.quant.schemes import Absmax, Scales, Zeropoint
from wakeful.quant.schemes.grids import E4M3, MxE2M1

TOKENS = torch.arange(40).view(2, 20)
TOKENIZER = Tokenizer.train(["def f(x):\n    return x + 1\n"] * 5, 270)


class Half(Absmax):
    """Scales in half precision."""

    examples = ("half(bits=4, per='channel', group=8)",)
    scale_type = torch.float16

    def fit(self, smallest: Tensor, largest: Tensor) -> Scales:
        found = super().fit(smallest, largest)
        return replace(found, scale=found.scale.half().float())


class Brain(Half):
    """Scales in bfloat16."""

    examples = ("brain(bits=8, per='channel')",)
    scale_type = torch.bfloat16

    def fit(self, smallest: Tensor, largest: Tensor) -> Scales:
        found = super().fit(smallest, largest)
        return replace(found, scale=found.scale.bfloat16().float())


class Ranged(Zeropoint):
    """Zero points beside scales in half precision."""

    examples = ("ranged(bits=4, per='channel')",)
    scale_type = torch.float16

    def fit(self, smallest: Tensor, largest: Tensor) -> Scales:
        found = super().fit(smallest, largest)
        return replace(found, scale=found.scale.half().float())


class Eighths(E4M3):
    """Scales that are 8-bit floats themselves."""

    examples = ("eighths(per='channel', group=16)",)
    scale_type = torch.float8_e4m3fn

    def fit(self, smallest: Tensor, largest: Tensor) -> Scales:
        found = super().fit(smallest, largest)
        scale = found.scale.clamp_min(2.0**-9).to(self.scale_type).float()
        return replace(found, scale=scale)


class Powers(MxE2M1):
    """MXFP4 by another name."""

    examples = ("powers(per='channel')",)


GRIDS = (Half, Brain, Ranged, Eighths, Powers)
SCHEMES = [
    f"scheme(weights={__name__}:{each.__name__}{each.examples[0][each.examples[0].index('(') :]})"
    for each in GRIDS
]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=270, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_is_read_back(
    scheme: str, dtype: torch.dtype, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    source = wakeful.load(copy.deepcopy(model).to(dtype), tokenizer=TOKENIZER)
    small = wakeful.quantize(source, scheme, save=str(tmp_path / "out")).model
    read = wakeful.load(tmp_path / "out", dtype=dtype)
    if dtype == torch.float32:  # a cast rounds rotary frequencies, which no file has
        assert torch.equal(read.logits(TOKENS), small.logits(TOKENS))
    layers, before = quantized_layers(read.module), quantized_layers(small.module)
    for name, layer in layers.items():
        grid = layer.grid
        assert type(grid) is type(before[name].grid)
        stored = torch.uint8 if grid.scale_type.itemsize == 1 else grid.scale_type
        assert layer.scale.dtype == before[name].scale.dtype == stored
        assert torch.equal(layer.dequantized(), before[name].dequantized())
