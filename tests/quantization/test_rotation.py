"""Rotations of input channels by blocks, against their definition in float64."""

import re
from dataclasses import replace

import pytest
import torch
from test_convert import logits
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.pytorch_utils import Conv1D

from wakeful.errors import WakefulError
from wakeful.quantization import parse_scheme, quantize_module, quantized_layers
from wakeful.quantization.convert import linear_layers
from wakeful.quantization.formats import quantize_layers
from wakeful.quantization.linear import quantize_layer, quantize_layer_with_schemes, rotate_channels
from wakeful.quantization.schemes import Scheme
from wakeful.quantization.schemes.methods import InputStatistics
from wakeful.quantization.tuning import _start_log_ratios, _trainable_scales

SCHEMES = [
    "mxfp4(rotation=16)", "mxfp4(method=gptq, rotation=16)", "nvfp4(rotation=4)",
    "w4a16(weights=absmax(bits=4, per='channel', group=16), method=gptq, rotation=64)",
    "w8a8(rotation=64)", "fp8(rotation=4)", "w4(rotation=16)", "smoothquant(rotation=16)",
    "scheme(weights=mx_e2m1(per='channel'), rotation=16)",
]  # fmt: skip
WIDTH = 192


def llama(width: int = 32, mlp_width: int = 64) -> LlamaForCausalLM:
    """Return a random model with grouped queries."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=29, hidden_size=width, intermediate_size=mlp_width, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def rotation_matrix(size: int, width: int = WIDTH) -> Tensor:
    """Return R (K, K) by definition: blocks of Sylvester's Hadamard matrix over the root of its
    size.
    """
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return torch.block_diag(*[matrix / size**0.5] * (width // size))


def whole_numbers(*shape: int, largest: int = 64) -> Tensor:
    """Return numbers that float32 rotates by 4, 16 or 64 channels without rounding."""
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randint(-largest, largest + 1, shape, generator=generator).float()


def unrotated(scheme: Scheme) -> Scheme:
    return replace(scheme, rotation=0)


@pytest.mark.parametrize("size", [2, 4, 16, 32, 64, 128, 1024])
def test_channels_are_multiplied_by_the_matrix(size: int) -> None:
    matrix = rotation_matrix(size, width=2048)
    x = torch.randn(3, 5, 2048, dtype=torch.float64, requires_grad=True)
    rotated = rotate_channels(x, size)
    torch.testing.assert_close(rotated, x @ matrix, rtol=0, atol=1e-13)
    torch.testing.assert_close(rotate_channels(rotated, size), x, rtol=0, atol=1e-13)
    weight = torch.randn(3, 5, 2048, dtype=torch.float64)
    (gradient,) = torch.autograd.grad((rotated * weight).sum(), x)
    torch.testing.assert_close(gradient, weight @ matrix.T, rtol=0, atol=1e-13)
    assert rotate_channels(x, 0) is x


@pytest.mark.parametrize("expression", SCHEMES)
@torch.no_grad()
def test_a_rotated_layer_is_a_layer_of_the_rotated_weight(expression: str) -> None:
    scheme = parse_scheme(expression)
    matrix = rotation_matrix(scheme.rotation)
    layer, turned = nn.Linear(WIDTH, 12), nn.Linear(WIDTH, 12)
    text, x = whole_numbers(300, WIDTH, largest=2), whole_numbers(2, 7, WIDTH)
    layer.weight.copy_(whole_numbers(12, WIDTH))
    turned.bias.copy_(layer.bias)
    gram = text.double().T @ text.double()
    statistics = InputStatistics(text.abs().amax(0), 0.0, gram.float(), layer.weight.abs().amax(0))
    divisor = torch.ones(WIDTH)
    if scheme.rounding.divides_inputs:
        assert scheme.weights is not None
        divisor = scheme.rounding.compute_divisor(statistics, scheme.weights)
        # Powers of two, so that nothing is rounded here either.
        divisor = divisor.log2().round().exp2()
        scheme = _with_divisor(scheme, divisor)
    rotated_weight = (layer.weight * divisor).double() @ matrix
    turned.weight.copy_(rotated_weight.float())
    turned_statistics = replace(statistics, gram=(matrix.T @ gram @ matrix).float())
    quantized = quantize_layer(layer, scheme, statistics)
    plain = replace(unrotated(scheme), method=None) if scheme.rounding.divides_inputs else None
    expected = quantize_layer(turned, plain or unrotated(scheme), turned_statistics)
    assert torch.equal(quantized.integers, expected.integers)
    assert torch.equal(quantized.scale, expected.scale)
    turned_x = ((x / divisor).double() @ matrix).float()
    torch.testing.assert_close(quantized(x), expected(turned_x), rtol=0, atol=0)


def _with_divisor(scheme: Scheme, divisor: Tensor) -> Scheme:
    """Return the scheme with a method that divides by a given divisor."""

    class Fixed(type(scheme.rounding)):
        def compute_divisor(self, _statistics: object, _grid: object) -> Tensor:
            return divisor

    return replace(scheme, method=Fixed())


def test_a_rotation_alone_changes_no_function() -> None:
    """The quantized weight, rotated back, is the weight to a step of its grid."""
    layer = nn.Linear(WIDTH, 10)
    scheme = parse_scheme("scheme(weights=absmax(bits=8, per='channel'), rotation=32)")
    quantized = quantize_layer(layer, scheme)
    back = rotate_channels(quantized.dequantize(), 32)
    step = quantized.operands.scales.scale.max()
    assert (back - layer.weight).abs().max() < 4 * step
    x = torch.randn(4, WIDTH)
    torch.testing.assert_close(quantized(x), layer(x), rtol=0, atol=0.02)


@pytest.mark.parametrize(
    "expression", ["mxfp4(rotation=8)", "nvfp4(rotation=16)", "w8a8(rotation=2)"]
)
def test_training_computes_what_the_layer_does(expression: str) -> None:
    layer = quantize_layer(nn.Linear(32, 8), parse_scheme(expression))
    x = torch.randn(2, 5, 32, requires_grad=True)
    ratios = _start_log_ratios({"it": layer})
    with _trainable_scales({"it": layer}, ratios):
        trained = layer(x)
        (gradient,) = torch.autograd.grad(trained.sum(), x)
    torch.testing.assert_close(trained, layer(x), rtol=1e-5, atol=1e-5)
    rotated_back = rotate_channels(layer.dequantize(), layer.scheme.rotation).sum(0)
    torch.testing.assert_close(gradient, rotated_back.expand_as(x), rtol=1e-4, atol=1e-5)


def test_layers_that_share_an_outer_scale_share_that_of_rotated_weights() -> None:
    model = llama()
    layers = quantized_layers(quantize_module(model, "nvfp4(rotation=16)"))
    names = [f"model.layers.0.self_attn.{each}_proj" for each in "qkv"]
    weights = [rotate_channels(model.get_submodule(name).weight.detach(), 16) for name in names]
    largest = max(float(weight.abs().max()) for weight in weights)
    expected = layers[names[0]].grid.scale_for_max(torch.full((1, 1), largest))
    for name in names:
        assert torch.equal(layers[name].outer, expected)


def test_a_model_loses_little_to_eight_bits() -> None:
    model = llama()
    expected = logits(model)
    plain = logits(quantize_module(model, "w8a8")) - expected
    rotated = logits(quantize_module(model, "w8a8(rotation=16)")) - expected
    assert rotated.norm() < 2 * plain.norm() < 0.2 * expected.norm()


def test_outliers_cost_less() -> None:
    """One outlier channel in each group of 32 takes the others' precision."""
    layer = nn.Linear(128, 64)
    x = torch.randn(256, 128)
    x[:, ::32] *= 30
    with torch.no_grad():
        errors = [
            float((quantize_layer(layer, parse_scheme(name))(x) - layer(x)).norm())
            for name in ("mxfp4", "mxfp4(rotation=32)")
        ]
    assert errors[1] < 0.8 * errors[0]


def test_schemes_of_several_rotations_are_rounded_apart() -> None:
    model = llama()
    layers = linear_layers(model)
    names = (
        "mxfp4",
        "mxfp4(rotation=16)",
        "w8a8",
        "mxfp4(method=gptq)",
        "mxfp4(method=gptq, rotation=8)",
    )
    schemes, text = {name: parse_scheme(name) for name in names}, [torch.arange(29)[None]]
    together = quantize_layers(model, layers, schemes, text)
    for name, scheme in schemes.items():
        calibration = text if scheme.calibrated else ()
        alone = quantized_layers(quantize_module(model, scheme, calibration=calibration))
        assert alone.keys() == together[name].keys()
        for layer, quantized in alone.items():
            assert torch.equal(quantized.integers, together[name][layer].integers)
    copies = quantize_layer_with_schemes(layers["lm_head"], [schemes["mxfp4(rotation=16)"]])
    assert copies[0].scheme.rotation == 16


def test_a_rotation_that_does_not_fit_is_refused() -> None:
    model = llama(mlp_width=48)
    with pytest.raises(WakefulError, match=r"down_proj reads 48 channels, which rotations of 32"):
        quantize_module(model, "mxfp4(rotation=32)", skip=["lm_head"])
    pattern = "model.layers.*.mlp.down_proj"
    with pytest.raises(WakefulError, match=re.escape(f"--skip '{pattern}'")):
        quantize_module(model, "mxfp4(rotation=32)")
    fitting_layers = quantized_layers(quantize_module(model, "mxfp4(rotation=32)", skip=[pattern]))
    layers = linear_layers(model)
    for expression in ("w8a8(rotation=32)", "nvfp4(rotation=32)"):
        schemes = {"it": parse_scheme(expression)}
        fitting = quantize_layers(model, layers, schemes, (), only_fitting=True)["it"]
        assert (
            fitting.keys()
            == fitting_layers.keys()
            == layers.keys() - {f"model.layers.{index}.mlp.down_proj" for index in (0, 1)}
        )
    for expression, message in (
        ("mxfp4(rotation=24)", "a power of two, or 0 for none, not 24"),
        ("mxfp4(rotation=1)", "not 1"),
        ("mxfp4(rotation=-4)", "not -4"),
        ("kv8(rotation=32)", "does not act on a cache"),
        ("nvfp4(rotation=16, scales='static')", "gives no scales of rotated inputs"),
    ):
        with pytest.raises(WakefulError, match=message):
            parse_scheme(expression)


def test_names_and_equality() -> None:
    scheme = parse_scheme("mxfp4(rotation=32)")
    assert str(scheme) == "mxfp4(rotation=32)"
    assert parse_scheme(scheme.definition) == scheme != parse_scheme("mxfp4")


@torch.no_grad()
def test_weights_that_are_stored_transposed_are_rotated() -> None:
    layer, linear = Conv1D(6, 32), nn.Linear(32, 6)
    linear.weight.copy_(layer.weight.T)
    linear.bias.copy_(layer.bias)
    x, scheme = torch.randn(2, 3, 32), parse_scheme("w8a8(rotation=16)")
    expected = quantize_layer(linear, scheme)
    assert torch.equal(quantize_layer(layer, scheme)(x), expected(x))
    assert expected(x[:0]).shape == (0, 3, 6)


def test_block_after_block_reads_rotated_layers() -> None:
    model, text = llama(), [torch.arange(29)[None], torch.arange(29).flip(0)[None]]
    scheme = "mxfp4(method=gptq(sequential=True), rotation=16)"
    quantized = quantize_module(model, scheme, calibration=text)
    plain = quantize_module(model, scheme.replace("(sequential=True)", ""), calibration=text)
    first, last = (f"model.layers.{index}.mlp.gate_proj" for index in (0, 1))
    ours, theirs = quantized_layers(quantized), quantized_layers(plain)
    assert not torch.equal(ours[last].integers, theirs[last].integers)
    assert torch.equal(ours[first[:-13] + "self_attn.q_proj"].integers,
                       theirs[first[:-13] + "self_attn.q_proj"].integers)  # fmt: skip
