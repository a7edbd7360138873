"""torchao's kernels on our integers, where torchao is installed; and what is said where not."""

import importlib.util

import pytest
import torch
from test_convert import gpt2, logits
from torch import nn

from helpers import tiny_decoder
from wakeful.errors import WakefulError
from wakeful.quantization import SCHEMES, parse_scheme, quantize_module
from wakeful.quantization.arithmetic import torchao_kernels
from wakeful.quantization.linear import quantized

INSTALLED = importlib.util.find_spec("torchao") is not None
needs_torchao = pytest.mark.skipif(not INSTALLED, reason="torchao is not installed")


@needs_torchao
@pytest.mark.parametrize(
    "text",
    [
        *SCHEMES,
        "w4(weights=absmax(bits=4, per='channel'))",
        "scheme(weights=zeropoint(bits=5, per='tensor'))",
    ],
)
@pytest.mark.parametrize("width", [8, 13, 64])
def test_a_layer_agrees_with_the_reference(text: str, width: int) -> None:
    layer = nn.Linear(width, 11)
    with torch.no_grad():
        layer.weight.mul_(20).add_(0.3)
    x = torch.randn(2, 5, width)
    x[0, 0, 0] = 60.0
    one, other = (quantized(layer, parse_scheme(text), way) for way in ("reference", "torchao"))
    torch.testing.assert_close(other(x), one(x), rtol=1e-6, atol=1e-6)


@needs_torchao
@pytest.mark.parametrize("scheme", SCHEMES)
def test_whole_models_agree(scheme: str) -> None:
    for model in (tiny_decoder(dtype=torch.float32).eval(), gpt2()):
        one, other = (logits(quantize_module(model, scheme, arithmetic=way))
                      for way in ("reference", "torchao"))  # fmt: skip
        torch.testing.assert_close(other, one, rtol=1e-4, atol=1e-4)


@needs_torchao
def test_what_torchao_cannot_multiply_is_refused() -> None:
    scheme = parse_scheme(
        "scheme(weights=zeropoint(bits=8, per='channel'), inputs=absmax(bits=8, per='token'))"
    )
    with pytest.raises(WakefulError, match=r"a zero point, and scheme\(weights=zeropoint"):
        quantize_module(tiny_decoder().eval(), scheme, arithmetic="torchao")


def test_its_absence_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.kernel.intmm", None)
    torchao_kernels.cache_clear()
    with pytest.raises(WakefulError, match=r"pip install 'wakeful\[torchao\]'") as caught:
        quantize_module(tiny_decoder().eval(), "fine", arithmetic="torchao")
    assert "\n" not in str(caught.value)
    torchao_kernels.cache_clear()
