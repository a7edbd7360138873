"""Tuning of scales: its gradient against autograd's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from wakeful.quantization.linear import quantize_layer
from wakeful.quantization.schemes import Absmax, Grid, Scheme
from wakeful.quantization.schemes.grids import Ggml
from wakeful.quantization.tuning import _trainable_scales

GRIDS: list[Grid] = [
    Absmax(bits=4, per="channel", group=16, scale="bfloat16"),
    Absmax(bits=8, per="channel", scale="bfloat16"),
    Absmax(bits=8, per="tensor"),
    Ggml(bits=4), Ggml(bits=5),
]  # fmt: skip


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_gradients_are_those_of_scaled_codes(grid: Grid) -> None:
    layer = quantize_layer(nn.Linear(64, 5), Scheme(weights=grid))
    first, x = layer.scale, torch.randn(2, 7, 64, requires_grad=True)
    logarithm = (0.1 * torch.randn(first.shape)).requires_grad_()
    with _trainable_scales({"": layer}, {"": first}, {"": logarithm}):
        y = layer(x)
    upstream = torch.randn_like(y)
    found = torch.autograd.grad(y, [x, logarithm], upstream)
    exact = first.float() * logarithm.exp()
    scale = exact.to(first.dtype).float()
    theta = torch.zeros_like(logarithm, requires_grad=True)
    codes = layer.operands.integers.float().unflatten(1, (scale.shape[1], -1))
    weight = (codes * (scale * theta.exp()).unsqueeze(2)).flatten(1)
    expected = F.linear(x, weight, layer.bias)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, [x, theta], upstream))
