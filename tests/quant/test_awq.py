"""AWQ's division of inputs and ranges that shrink, by their definitions."""

import pytest
import torch
from test_convert import llama
from torch import Tensor

from helpers import some_tokens
from wakeful.errors import WakefulError
from wakeful.quant import parse_scheme, quantize, quantized_layers
from wakeful.quant.schemes.grids import Absmax, Grid, MxE2M1, NvE2M1, Zeropoint
from wakeful.quant.schemes.methods import shrunk

TEXT = [some_tokens(1, 24, seed=n) for n in range(3)]
GRIDS: list[Grid] = [
    Zeropoint(bits=3, per="channel"), Absmax(bits=3, per="tensor"),
    Zeropoint(bits=3, per="channel", group=5), Absmax(bits=3, per="channel", group=8),
    MxE2M1(per="channel"), NvE2M1(per="tensor"), NvE2M1(per="tensor", adaptive=True),
]  # fmt: skip


def test_awq_is_its_definition() -> None:
    model, grid = llama(), Absmax(bits=3, per="channel")
    attention = model.model.layers[1].self_attn
    read: list[Tensor] = []
    hook = attention.q_proj.register_forward_pre_hook(lambda _m, args: read.append(args[0][0]))
    with torch.no_grad():
        for each in TEXT:
            model(each)
    hook.remove()
    x = torch.cat(read)
    matrices = [each.weight.detach() for each in (attention.q_proj, attention.k_proj,
                                                  attention.v_proj)]  # fmt: skip
    errors, found = [], []
    for number in range(20):
        s = x.abs().mean(0) ** (number / 20)
        s = s / (s.max() * s.min()).sqrt()
        error = 0.0
        for w in matrices:
            w_hat = grid.fake_quantize(w * s, grid.scales_of(w * s)) / s
            error += float((x @ (w_hat - w).T).square().sum())
        errors.append(error)
        found.append(s)
    best = min(range(20), key=errors.__getitem__)
    assert best > 0
    scheme = "scheme(weights=absmax(bits=3, per='channel'), method=awq(weighting='none'))"
    layers = quantized_layers(quantize(model, scheme, calibration=TEXT))
    for name, w in zip("qkv", matrices, strict=True):
        layer = layers[f"model.layers.1.self_attn.{name}_proj"]
        assert layer.divisor is not None
        torch.testing.assert_close(layer.divisor, found[best])
        scaled = w * layer.divisor
        expected = grid.fake_quantize(scaled, grid.scales_of(scaled))
        torch.testing.assert_close(layer.dequantized(), expected)
        y = (x / layer.divisor) @ expected.T
        torch.testing.assert_close(layer(x), y, rtol=1e-4, atol=1e-5)
    with pytest.raises(WakefulError, match="points"):
        parse_scheme("w4(method=awq(points=0))")


def test_only_readers_of_norms_are_divided_where_asked() -> None:
    layers = quantized_layers(quantize(llama(), "w4(method=awq(norms=True))", calibration=TEXT))
    for name, layer in layers.items():
        after_norm = name == "lm_head" or name.endswith(("q_proj", "k_proj", "v_proj", "gate_proj",
                                                         "up_proj"))  # fmt: skip
        assert layer.divisor is not None
        assert after_norm or bool((layer.divisor == 1).all())
    assert any(bool((layer.divisor != 1).any()) for layer in layers.values())  # pyright: ignore


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_a_range_shrinks_where_that_is_nearer(grid: Grid) -> None:
    torch.manual_seed(0)
    weight, importance = torch.randn(6, 21), torch.rand(21) ** 2
    whole = grid.scales_of(weight)

    def errors(scales) -> Tensor:
        return grid.shared_sum((weight - grid.fake_quantize(weight, scales)).square() * importance)

    low, high = grid.bounds(weight)
    tried = torch.stack([errors(whole), *(
        errors(grid.scales_between(low * share, high * share, whole.outer))
        for share in torch.linspace(1, 0.5, 26).tolist()
    )])  # fmt: skip
    found = shrunk(grid, weight, whole, importance)
    torch.testing.assert_close(errors(found), tried.amin(0))
    assert bool((errors(found) <= errors(whole) * (1 + 1e-6)).all())
    assert bool((errors(found) < errors(whole)).any())
    assert grid.shared_sum(torch.ones(6, 21)).sum() == 6 * 21
