"""AutoRound and GPTQ over quantized blocks, by their definitions."""

from typing import Any

import pytest
import torch
from test_convert import gpt2, llama
from torch import Tensor, nn

from helpers import some_tokens, tiny_decoder
from wakeful.errors import WakefulError
from wakeful.probes.running import logits_of
from wakeful.quant import parse_scheme, quantize, quantized_layers
from wakeful.quant.convert import linear_layers
from wakeful.quant.experts import put
from wakeful.quant.linear import QuantizedLinear, matrix
from wakeful.quant.observing import observe
from wakeful.quant.schemes.autoround import Rounding
from wakeful.quant.schemes.grids import E4M3, Absmax, Grid, MxE2M1, NvE2M1, Zeropoint

GRIDS: list[Grid] = [
    Zeropoint(bits=4, per="channel"), Absmax(bits=3, per="tensor"),
    Zeropoint(bits=4, per="channel", group=5), Absmax(bits=4, per="channel", group=8),
    E4M3(per="channel"), MxE2M1(per="channel"), NvE2M1(per="tensor"),
    NvE2M1(per="tensor", adaptive=True),
]  # fmt: skip
TEXT = [some_tokens(1, 24, seed=n) for n in range(4)]


def decoder(**changes: Any) -> nn.Module:
    return tiny_decoder(dtype=torch.float32, **changes).eval()


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_what_is_learned_is_what_is_stored(grid: Grid) -> None:
    torch.manual_seed(0)
    each = Rounding(torch.randn(3, 21), grid)
    plain = grid.fake_quantize(each.weight, grid.scales_of(each.weight))
    assert torch.equal(each.laid(), plain)
    with torch.no_grad():
        each.offset.uniform_(-0.5, 0.5)
        for share in (each.below, each.above):
            if share.requires_grad:
                share.uniform_(0.6, 1)
    codes, scales = each.rounded()
    assert torch.equal(grid.dequantize(codes, scales), each.laid())
    assert not torch.equal(each.laid(), plain)
    assert len(each.learned) == (1 if isinstance(grid, MxE2M1 | NvE2M1) else 3)


def test_gradients_pass_a_rounding_as_if_it_were_not_there() -> None:
    grid = Absmax(bits=4, per="channel")
    each = Rounding(torch.tensor([[1.0, -0.32, 0.11, 0.9]]), grid)
    with torch.no_grad():
        each.above.fill_(0.7)
        each.below.fill_(0.7)
    laid, g = each.laid(), torch.tensor([[0.3, -2.0, 5.0, 1.0]])
    offset, below, above = torch.autograd.grad(laid, each.learned, g)
    step = 0.7 / 7
    inside = torch.tensor([[0.0, 1.0, 1.0, 0.0]])  # 1.0 and 0.9 are past the range
    torch.testing.assert_close(offset, g * step * inside)
    # ∂Ŵ/∂s = q − W/s inside and q past the range; s = α · 1.0 / 7.
    q = torch.tensor([[7.0, -3.0, 1.0, 7.0]])
    by_step = ((q - each.weight / step * inside) * g).sum()
    torch.testing.assert_close(above, (by_step / 7).reshape(1, 1), rtol=1e-4, atol=1e-5)
    assert float(below) == 0  # the largest |W| is above zero
    each.move([offset, below, above], 0.1)
    torch.testing.assert_close(each.offset, -0.1 * offset.sign())
    torch.testing.assert_close(each.above, 0.7 - 0.1 * above.sign())


def test_a_range_with_a_zero_point_is_the_papers_formula() -> None:
    """Of gradients too, which the authors' code gives alike to the last digits."""
    torch.manual_seed(0)
    each, g = Rounding(torch.randn(6, 10), Zeropoint(bits=4, per="channel")), torch.randn(6, 10)
    with torch.no_grad():
        each.offset.uniform_(-0.5, 0.5)
        each.below.uniform_(0.6, 1)
        each.above.uniform_(0.6, 1)

    def rounded(x: Tensor) -> Tensor:
        return x + (x.round() - x).detach()

    low, high = each.weight.amin(1, keepdim=True), each.weight.amax(1, keepdim=True)
    s = (high * each.above - low * each.below) / 15
    z = rounded(-low * each.below / s)
    q = (rounded(each.weight / s + each.offset) + z).clamp(0, 15)
    expected = (q - z) * s
    torch.testing.assert_close(each.laid(), expected)
    torch.testing.assert_close(
        torch.autograd.grad(each.laid(), each.learned, g),
        torch.autograd.grad(expected, each.learned, g), rtol=1e-4, atol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize(("make", "scheme"), [(llama, "nvfp4"), (gpt2, "w4"), (decoder, "w4a4")])
def test_autoround_makes_the_models_output_better(make, scheme: str) -> None:
    model, plain = make(), parse_scheme(scheme)
    full = [logits_of(model, each).detach() for each in TEXT]

    def error(small: nn.Module) -> float:
        return sum(
            float((logits_of(small, each).detach() - y).square().sum())
            for each, y in zip(TEXT, full, strict=True)
        )

    before = {name: each.clone() for name, each in model.state_dict().items()}
    asked = f"{scheme}(method=autoround(steps=12, batch=3))"
    told: list[tuple[int, int]] = []
    with torch.inference_mode():  # as a user may call it
        small = quantize(
            model, asked, calibration=TEXT, passed=lambda done, of: told.append((done, of))
        )
    total = len(quantized_layers(small))
    assert told[-1] == (total, total)
    assert [done for done, _ in told] == sorted(done for done, _ in told)
    nearest = quantize(model, plain)
    assert error(small) < 0.75 * error(nearest)
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    assert not any(isinstance(each, QuantizedLinear) for each in model.modules())
    assert all(each.grad is None for each in model.parameters())
    again = quantize(model, asked, calibration=TEXT)
    assert torch.equal(logits_of(small, TEXT[0]), logits_of(again, TEXT[0]))
    for name, layer in quantized_layers(small).items():
        x = torch.randn(5, layer.in_features)
        y = layer.rounded_inputs(x) @ layer.dequantized().T
        y = y if layer.bias is None else y + layer.bias
        torch.testing.assert_close(layer.linear(x), y, rtol=1e-4, atol=1e-5)
        if scheme == "nvfp4":  # engines multiply matrices that read one tensor as one
            assert layer.outer is not None
            torch.testing.assert_close(layer.outer, quantized_layers(nearest)[name].outer)


@pytest.mark.parametrize(("make", "dtype"), [(gpt2, torch.bfloat16), (decoder, torch.float64)])
def test_blocks_of_any_type_are_fitted(make, dtype: torch.dtype) -> None:
    model = make().to(dtype)
    small, nearest = (
        quantize(model, scheme, calibration=TEXT if more else ())
        for scheme, more in (("w4(method=autoround(steps=12, batch=4))", True), ("w4", False))
    )
    full, found, plain = (logits_of(each, TEXT[0]).double() for each in (model, small, nearest))
    assert logits_of(small, TEXT[0]).dtype == dtype
    assert (found - full).square().sum() < (plain - full).square().sum()


def test_a_block_is_fitted_to_what_it_gave_in_full_precision() -> None:
    """Not to what it gives where the blocks before it are quantized already."""
    model: Any = llama()
    one, two = model.model.layers
    coarse = "scheme(weights=absmax(bits=2, per='channel'), method=autoround(steps=15, batch=4))"
    states: dict[str, list[Tensor]] = {}

    def read(name: str, which: nn.Module, block: nn.Module) -> None:
        hook = block.register_forward_hook(
            lambda _m, _a, y: states.setdefault(name, []).append(y.detach())
        )
        for each in TEXT:
            logits_of(which, each)
        hook.remove()

    read("wanted", model, two)
    small: Any = quantize(model, coarse, calibration=TEXT)
    read("found", small, small.model.layers[1])
    apart: Any = quantize(model, coarse, calibration=TEXT, skip=["*layers.0*", "lm_head"])
    apart.model.layers[0] = small.model.layers[0]
    read("apart", apart, apart.model.layers[1])
    errors = {
        name: sum(
            float((a - b).square().sum())
            for a, b in zip(states[name], states["wanted"], strict=True)
        )
        for name in ("found", "apart")
    }
    assert errors["found"] < 0.9 * errors["apart"]
    assert one is model.model.layers[0]


@pytest.mark.parametrize("make", [llama, gpt2, decoder, lambda: decoder(route="resformer")])
def test_sequential_gptq_rounds_by_what_quantized_blocks_give(make) -> None:
    model = make()
    method = "gptq(weighting='none', sequential={})"
    grid = "scheme(weights=absmax(bits=3, per='channel'), method={})"
    small, apart = (
        quantized_layers(quantize(model, grid.format(method.format(how)), calibration=TEXT))
        for how in (True, False)
    )
    first, later = ("h.0.", "h.1.") if "transformer.h.0.mlp.c_fc" in small else ("s.0.", "s.1.")
    scheme = parse_scheme(grid.format(method.format(False)))
    assert scheme.method is not None
    assert scheme.weights is not None
    layers = linear_layers(model)
    inside = {name: each for name, each in layers.items() if later in name}
    put(model, {name: each for name, each in small.items() if first in name})
    seen = observe(model, inside, TEXT, products=True)
    put(model, layers)
    assert inside
    for name, layer in inside.items():
        codes, scales = scheme.method.round(matrix(layer)[0], scheme.weights, seen[name].products)
        expected = scheme.weights.dequantize(codes, scales)
        torch.testing.assert_close(small[name].dequantized(), expected)
    for name in small:
        same = torch.equal(small[name].dequantized(), apart[name].dequantized())
        assert same == (first in name)


def test_blocks_that_read_earlier_layers_are_refused() -> None:
    with pytest.raises(WakefulError, match="autoround cannot fit one apart"):
        quantize(decoder(route="resformer"), "w4(method=autoround(steps=1))", calibration=TEXT[:1])
    with pytest.raises(WakefulError, match="steps and batch"):
        parse_scheme("w4(method=autoround(steps=0))")
