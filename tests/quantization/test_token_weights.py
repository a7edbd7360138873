"""Tokens in XᵀX weigh what the loss hears of them, by the definition."""

import pytest
import torch
from test_convert import gpt2, llama
from torch import Tensor, nn

from helpers import some_tokens, tiny_decoder
from wakeful.errors import WakefulError
from wakeful.model.attention import Heads
from wakeful.probes.running import logits_of
from wakeful.quantization import quantize_module
from wakeful.quantization.calibration import collect_statistics
from wakeful.quantization.convert import linear_layers
from wakeful.quantization.linear import weight_and_bias
from wakeful.quantization.schemes import parse_scheme
from wakeful.quantization.token_weights import compute_token_weights


def decoder() -> nn.Module:
    return tiny_decoder(dtype=torch.float32, qk_norm=True).eval()


def by_definition(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Return ∂ℓ/∂δ of a zero δ_t that is added to what each matrix gives."""
    deltas: dict[str, Tensor] = {}
    hooks = []

    def delta(name: str, y: Tensor) -> Tensor:
        deltas[name] = torch.zeros_like(y, requires_grad=True)
        return y + deltas[name]

    for name, layer in linear_layers(model).items():
        if isinstance(layer, Heads):
            hook = layer.norm.register_forward_pre_hook(
                lambda _m, args, name=name: (delta(name, args[0]),)
            )
        else:
            hook = layer.register_forward_hook(lambda _m, _a, y, name=name: delta(name, y))
        hooks.append(hook)
    found = logits_of(model, tokens)[0, :-1]
    loss = nn.functional.cross_entropy(found, tokens[0, 1:], reduction="sum")
    for hook in hooks:
        hook.remove()
    gradients = torch.autograd.grad(loss, list(deltas.values()))
    return {
        name: gradient.reshape(tokens.shape[1], -1).square().mean(1)
        for name, gradient in zip(deltas, gradients, strict=True)
    }


@pytest.mark.parametrize("make", [decoder, llama, gpt2])
def test_weights_and_products_are_those_of_the_losss_gradient(make) -> None:
    model = make()
    layers, tokens = linear_layers(model), [some_tokens(1, 12, seed=n) for n in range(2)]
    expected = [by_definition(model, each) for each in tokens]
    heard = compute_token_weights(model, layers, tokens)
    inputs: dict[str, list[Tensor]] = {name: [] for name in layers}
    hooks = [
        layer.register_forward_pre_hook(lambda _m, args, n=name: inputs[n].append(args[0][0]))
        for name, layer in layers.items()
    ]
    with torch.no_grad():
        for each in tokens:
            logits_of(model, each)
    for hook in hooks:
        hook.remove()
    with torch.inference_mode():  # as a user may call it
        seen = collect_statistics(model, layers, tokens, gram=True, weights=heard)
    for name in layers:
        total = torch.zeros(2 * [weight_and_bias(layers[name])[0].shape[1]])
        for x, found, weights in zip(inputs[name], heard[name], expected, strict=True):
            least = 1e-6 * float(weights[name].max())
            torch.testing.assert_close(found[0], weights[name], rtol=1e-3, atol=least)
            total += x.T @ (weights[name].unsqueeze(1) * x)
        least = 1e-5 * float(total.abs().max())
        products = seen[name].gram
        assert products is not None
        torch.testing.assert_close(products, total, rtol=1e-3, atol=least)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_token_that_the_loss_hears_more_of_is_rounded_better() -> None:
    """Of a text whose loss reads one token ten times as loudly, that one's error shrinks."""
    torch.manual_seed(0)
    x, weight = torch.randn(300, 48), torch.randn(24, 48)
    loud = torch.ones(300)
    loud[:6] = 100.0
    scheme = parse_scheme("scheme(weights=absmax(bits=4, per='channel'), method=gptq)")
    assert scheme.method is not None
    assert scheme.weights is not None
    errors = []
    for weights in (torch.ones(300), loud):
        codes = scheme.method.round_weight(weight, scheme.weights, x.T @ (weights.unsqueeze(1) * x))
        error = (scheme.weights.dequantize(*codes) - weight) @ x.T
        errors.append(float(error[:, :6].norm()))
    assert errors[1] < 0.7 * errors[0]


@pytest.mark.slow
def test_gptq_weighs_tokens_unless_told_otherwise() -> None:
    tokens = [some_tokens(1, 24)]
    name = "scheme(weights=absmax(bits=4, per='channel'), method=gptq{})"
    weighed, plain = (
        logits_of(quantize_module(decoder(), name.format(how), calibration=tokens), tokens[0])
        for how in ("", "(weighting='none')")
    )
    assert not torch.equal(weighed, plain)
    with pytest.raises(WakefulError, match="weighting"):
        parse_scheme(name.format("(weighting='some')"))
