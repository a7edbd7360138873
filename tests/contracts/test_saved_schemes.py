"""What `quantize --save` accepts can be read back, of grids from outside the package too."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import wakeful
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.quantization.convert import quantized_layers
from wakeful.quantization.schemes import Absmax, Scales, Zeropoint
from wakeful.quantization.schemes.grids import E4M3, MxE2M1

TOKENS = torch.arange(40).view(2, 20)
TOKENIZER = Tokenizer.train(["def f(x):\n    return x + 1\n"] * 5, 270)


class Half(Absmax):
    """Scales in half precision."""

    examples = ("half(bits=4, per='channel', group=8)",)
    scale_type = torch.float16

    def fit_scales(self, smallest: Tensor, largest: Tensor) -> Scales:
        found = super().fit_scales(smallest, largest)
        return replace(found, scale=found.scale.half().float())


class Brain(Half):
    """Scales in bfloat16."""

    examples = ("brain(bits=8, per='channel')",)
    scale_type = torch.bfloat16

    def fit_scales(self, smallest: Tensor, largest: Tensor) -> Scales:
        found = super().fit_scales(smallest, largest)
        return replace(found, scale=found.scale.bfloat16().float())


class Ranged(Zeropoint):
    """Zero points beside scales in half precision."""

    examples = ("ranged(bits=4, per='channel')",)
    scale_type = torch.float16

    def fit_scales(self, smallest: Tensor, largest: Tensor) -> Scales:
        found = super().fit_scales(smallest, largest)
        return replace(found, scale=found.scale.half().float())


class Eighths(E4M3):
    """Scales that are 8-bit floats themselves."""

    examples = ("eighths(per='channel', group=16)",)
    scale_type = torch.float8_e4m3fn

    def fit_scales(self, smallest: Tensor, largest: Tensor) -> Scales:
        found = super().fit_scales(smallest, largest)
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


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_it_is_read_back_or_refused(scheme: str, model: LlamaForCausalLM, tmp_path: Path) -> None:
    source = wakeful.load(copy.deepcopy(model), tokenizer=TOKENIZER)
    if any(name in scheme for name in ("Ranged", "Eighths")):
        with pytest.raises(WakefulError, match="cannot be saved as compressed-tensors"):
            wakeful.quantize(source, scheme, save=str(tmp_path / "out"))
        return
    small = wakeful.quantize(source, scheme, save=str(tmp_path / "out")).model
    read = wakeful.load(tmp_path / "out").module
    for name, layer in quantized_layers(small.module).items():
        grid = layer.grid
        assert (
            layer.scale.dtype == torch.uint8 if grid.scale_type.itemsize == 1 else grid.scale_type
        )
        weight = read.get_submodule(name).get_parameter("weight")
        torch.testing.assert_close(weight.float(), layer.dequantize(), rtol=2**-8, atol=0)
