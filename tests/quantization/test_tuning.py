"""Tuning of scales: its gradient against autograd's, and a state from which it goes on."""

import copy
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
from wakeful.quantization.linear import quantize_layer
from wakeful.quantization.schemes import Absmax, Grid, Scheme
from wakeful.quantization.schemes.grids import Ggml
from wakeful.quantization.tuning import (
    _load_state,
    _save_state,
    _set_kl_gradients,
    _trainable_scales,
    is_clear_decrease,
    sequences_per_step,
    tune_scales,
)

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


def test_tuning_that_was_interrupted_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    model, scheme = llama(), Scheme(weights=GRIDS[0])
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
    small = quantize_module(model, Scheme(weights=GRIDS[0]))
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
