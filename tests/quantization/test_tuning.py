"""Tuning of scales: its gradient against autograd's, and a state from which it goes on."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from helpers import some_tokens
from quantization.test_smallest import llama
from wakeful.errors import WakefulError
from wakeful.probes.running import logits_of
from wakeful.quantization import quantize_module, quantized_layers
from wakeful.quantization.linear import QuantizedLinear, quantize_layer
from wakeful.quantization.schemes import Absmax, Grid, Scheme, Zeropoint, parse_scheme
from wakeful.quantization.schemes.grids import Ggml, NvE2M1
from wakeful.quantization.schemes.methods import InputStatistics
from wakeful.quantization.tuning import (
    _load_state,
    _save_state,
    _set_kl_gradients,
    _start_log_ratios,
    _trainable_scales,
    count_sequences,
    is_clear_decrease,
    is_tunable,
    sequences_per_step,
    split_sequences,
    tune_scales,
)

W4 = Scheme(weights=Absmax(bits=4, per="channel", group=16, scale="bfloat16"))
SCHEMES = [
    W4,
    Scheme(weights=Absmax(bits=8, per="channel", scale="bfloat16")),
    Scheme(weights=Absmax(bits=8, per="tensor")),
    Scheme(weights=Absmax(bits=4, per="channel", group=48)),  # the last group is shorter
    Scheme(weights=Zeropoint(bits=4, per="channel", group=16)),
    Scheme(weights=Ggml(bits=4)),
    Scheme(weights=Ggml(bits=5)),
    parse_scheme("w8a8"),
    parse_scheme("coarse"),
    parse_scheme("coarse(scales='static')"),
    parse_scheme("fine(method=smooth)"),
    parse_scheme("fp8"),
    parse_scheme("nvfp4"),
    Scheme(weights=NvE2M1(per="channel")),
]


def quantized_layer(scheme: Scheme, x: torch.Tensor) -> QuantizedLinear:
    """Return a layer (64, 5) whose static scales and divisors are those of the inputs x."""
    linear = nn.Linear(64, 5).requires_grad_(False)
    statistics = InputStatistics(
        x.abs().amax((0, 1)), float(linear(x).abs().max()), None, linear.weight.abs().amax(0)
    )
    return quantize_layer(linear, scheme, statistics)


def plus_rounding_error(
    values: torch.Tensor, grid: Grid | None, scale: torch.Tensor | None
) -> torch.Tensor:
    """Return values (B, L, K) plus the constant by which a number format rounds them."""
    if grid is None:
        return values
    rows = values.detach().flatten(0, 1)
    rounded = grid.fake_quantize(rows, grid.compute_scales(rows, len(values), scale))
    return values + (rounded.view_as(values) - values.detach())


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_gradients_are_those_of_scaled_codes(scheme: Scheme) -> None:
    """Those of autograd, with rounding as the identity plus a constant."""
    x = torch.randn(2, 7, 64)
    layer = quantized_layer(scheme, x)
    log_ratios = {
        f"0.{name}": (0.1 * torch.randn(scale.shape)).requires_grad_()
        for name, scale in (("scale", layer.scale), ("outer", layer.outer))
        if scale is not None
    }
    x.requires_grad_()
    with _trainable_scales({"0": layer}, log_ratios):
        y = layer(x)
    upstream = torch.randn_like(y)
    gradients = torch.autograd.grad(y, [x, *log_ratios.values()], upstream)

    grid, operands = layer.grid, layer.operands
    first_scales = (operands.scales.scale, layer.outer)
    scales: list[torch.Tensor | None] = [None, None]
    thetas = [torch.zeros_like(theta, requires_grad=True) for theta in log_ratios.values()]
    for index, (theta, first) in enumerate(zip(thetas, first_scales, strict=False)):
        assert first is not None
        exact = first * list(log_ratios.values())[index].detach().exp()
        stored = exact if index else grid.decode_scale(grid.encode_scale(exact))
        scales[index] = stored * theta.exp()
    assert scales[0] is not None
    step, zero = replace(operands.scales, scale=scales[0], outer=scales[1]).expand(64)
    numbers = grid.decode(operands.integers, torch.float32)
    weight = (numbers if zero is None else numbers - zero) * step

    divided = x if layer.divisor is None else x / layer.divisor
    inputs = plus_rounding_error(divided, scheme.inputs, layer.input_scale)
    product = F.linear(inputs, weight, layer.bias)
    expected = plus_rounding_error(product, scheme.outputs, layer.output_scale)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected, [x, *thetas], upstream))
    assert all(float(gradient.abs().max()) > 0 for gradient in gradients)


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_a_layer_whose_scales_are_trained_computes_what_it_did(scheme: Scheme) -> None:
    x = torch.randn(2, 7, 64)
    layers = {"0": quantized_layer(scheme, x)}
    y = layers["0"](x)
    with _trainable_scales(layers, _start_log_ratios(layers)):
        torch.testing.assert_close(layers["0"](x), y)


def test_scales_of_powers_of_two_are_not_trained() -> None:
    assert not is_tunable(parse_scheme("mxfp4"))
    assert not is_tunable(parse_scheme("kv8"))
    assert all(map(is_tunable, SCHEMES))


def test_the_gradient_is_that_of_the_mean_divergence() -> None:
    model = llama()
    weight = model.get_parameter("lm_head.weight")
    student = copy.deepcopy(model)
    trained = student.get_parameter("model.layers.0.mlp.up_proj.weight")
    with torch.no_grad():
        trained += 0.3 * torch.randn_like(trained)
        weight *= 1.5
    text = [some_tokens(1, 24, vocab_size=61, seed=n) for n in range(3)]
    _set_kl_gradients(model, student, text, [trained])
    assert trained.grad is not None
    total = torch.zeros(())
    for tokens in text:
        with torch.no_grad():
            p = logits_of(model, tokens)[0, :-1].log_softmax(-1)
        total = total + (p.exp() * (p - logits_of(student, tokens)[0, :-1].log_softmax(-1))).sum()
    (expected,) = torch.autograd.grad(total / (3 * 23), [trained])
    torch.testing.assert_close(trained.grad, expected, rtol=1e-4, atol=1e-7)
    assert float(expected.abs().max()) > 1e-3


def test_every_ninth_sequence_decides() -> None:
    assert count_sequences(0, 256) == 0
    for steps, length in ((1, 512), (64, 256), (100, 2048)):
        text = [torch.tensor([[index]]) for index in range(count_sequences(steps, length))]
        training, validation = split_sequences(text)
        assert len(training) == steps * sequences_per_step(length)
        assert len(validation) == len(training) // 8
        assert [int(tokens) for tokens in validation] == list(range(8, len(text), 9))
        assert sorted(map(int, training + validation)) == list(range(len(text)))
    assert split_sequences([]) == ([], [])


def test_tuning_that_was_interrupted_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    model, scheme = llama(), W4
    text = [some_tokens(1, 400, vocab_size=61, seed=n) for n in range(5)]
    assert sequences_per_step(400) == 2

    def tune(steps: int, state: Path | None, stop: int = 0) -> dict[str, torch.Tensor]:
        small = quantize_module(model, scheme)

        def interrupt(done: int, _total: int) -> None:
            if stop and done == stop:
                raise KeyboardInterrupt

        tune_scales(model, small, text, text, steps=steps, rate=5e-3, state=state,
                    on_progress=interrupt)  # fmt: skip
        return {name: layer.scale for name, layer in quantized_layers(small).items()}

    whole, state = tune(6, None), tmp_path / "state.safetensors"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wakeful.quantization.tuning._SECONDS_BETWEEN_STATES", 0.0)
        with pytest.raises(KeyboardInterrupt):
            tune(6, state, stop=4)
    resumed = tune(6, state)
    for name, scale in whole.items():
        assert torch.equal(resumed[name], scale)
    with pytest.raises(WakefulError, match="is the state of tuning another model"):
        tune(7, state)
    state.write_bytes(b"nothing")
    with pytest.raises(WakefulError, match="is no state of tuning"):
        tune(6, state)


def test_layers_that_engines_fuse_keep_one_outer_scale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wakeful.quantization.tuning.is_clear_decrease", lambda *kl: True)
    model, state = llama(), tmp_path / "state.safetensors"
    text = [some_tokens(1, 24, vocab_size=61, seed=n) for n in range(2)]
    small = quantize_module(model, "nvfp4")
    layers = quantized_layers(small)
    before = {name: (layer.scale, layer.outer) for name, layer in layers.items()}
    tune_scales(model, small, text, text, steps=2, rate=0.1, state=state)
    changed = 0
    for block in ("model.layers.0.", "model.layers.1."):
        for fused in (
            ("self_attn.q", "self_attn.k", "self_attn.v"),
            ("mlp.gate", "mlp.up"),
        ):
            outers = [layers[f"{block}{part}_proj"].outer for part in fused]
            assert outers[0] is not None
            assert all(outer is not None and torch.equal(outer, outers[0]) for outer in outers)
    for name, layer in layers.items():
        scale, outer = before[name]
        assert layer.outer is not None
        assert outer is not None
        assert not torch.equal(layer.outer, outer)
        assert layer.scale.dtype == torch.uint8
        assert bool(layer.dequantize().isfinite().all())
        changed += int((layer.scale != scale).sum())
    assert changed > 100
    again = quantize_module(model, "nvfp4")  # the state has all steps: nothing is left to train
    tune_scales(model, again, text, text, steps=2, rate=0.1, state=state)
    for name, layer in quantized_layers(again).items():
        assert torch.equal(layer.dequantize(), layers[name].dequantize())


def test_a_model_without_scales_to_train_stays_as_it_is() -> None:
    model = llama()
    small = quantize_module(model, "mxfp4")
    text = [some_tokens(1, 24, vocab_size=61, seed=n) for n in range(2)]
    tuning = tune_scales(model, small, text, text, steps=2)
    assert (tuning.steps, tuning.improved) == (0, False)
    assert tuning.before == tuning.after


def test_layers_that_some_steps_do_not_reach_go_on_too(tmp_path: Path) -> None:
    """An expert to which a step's text sends no token has no gradient in that step."""
    steps = [{"a": 1.0}, {"a": 0.5, "c": 2.0}, {"a": 2.0, "b": 1.0, "c": -1.0}]
    file = tmp_path / "state.safetensors"

    def start() -> tuple[dict[str, torch.Tensor], torch.optim.Optimizer]:
        log_ratios = {name: torch.zeros(2, 1, requires_grad=True) for name in "abc"}
        return log_ratios, torch.optim.Adam(log_ratios.values(), lr=0.1)

    def run(
        log_ratios: dict[str, torch.Tensor], optimizer: torch.optim.Optimizer,
        gradients: list[dict[str, float]],
    ) -> None:  # fmt: skip
        for step in gradients:
            for name, theta in log_ratios.items():
                theta.grad = torch.full_like(theta, step[name]) if name in step else None
            optimizer.step()

    whole, optimizer = start()
    run(whole, optimizer, steps[:2])
    _save_state(file, optimizer, whole, "digest", 2)
    run(whole, optimizer, steps[2:])
    resumed, optimizer = start()
    assert _load_state(file, optimizer, resumed, "digest") == 2
    run(resumed, optimizer, steps[2:])
    for name, theta in whole.items():
        assert torch.equal(resumed[name], theta), name


def test_the_first_step_is_as_long_as_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adam's first step has the length of the rate, with which the cosine begins."""
    monkeypatch.setattr("wakeful.quantization.tuning.is_clear_decrease", lambda *kl: True)
    model = llama()
    small = quantize_module(model, W4)
    untrained = {name: layer.scale.float() for name, layer in quantized_layers(small).items()}
    text = [some_tokens(1, 24, vocab_size=61, seed=n) for n in range(2)]
    tune_scales(model, small, text, text, steps=1, rate=0.5)
    for name, layer in quantized_layers(small).items():
        changes = (layer.scale.float() / untrained[name]).log().abs()
        assert float(changes.max()) == pytest.approx(0.5, rel=0.02)


def test_scales_are_kept_only_where_the_whole_interval_is_a_decrease() -> None:
    before = [1.0, 2.0, 3.0]
    assert is_clear_decrease(before, [0.9, 1.88, 2.9])
    assert not is_clear_decrease(before, [0.9, 1.2, 3.2])  # on average, but not for certain
    assert not is_clear_decrease(before, [1.1, 2.2, 3.1])
    assert not is_clear_decrease([1.0], [0.5])  # a single sequence has no interval
