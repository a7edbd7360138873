"""Experts that Transformers keeps in one tensor a projection: quantized as any linear layer."""

import copy
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import wakeful
from probes.architectures import LLAMA, QWEN35
from wakeful.errors import WakefulError
from wakeful.probes.experts import Experts, is_fused
from wakeful.quantization import NAMED, quantize_module, quantized_layers
from wakeful.quantization.convert import prepare_model
from wakeful.quantization.measure import measure_damage
from wakeful.quantization.sensitivity import measure_layer_costs

FEW = LLAMA | {"vocab_size": 320, "initializer_range": 0.3}
ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "Mixtral": FEW | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen3Moe": FEW | ROUTED | {"mlp_only_layers": [0]},
    # Projections (in, out) with biases, and gates between the others' columns.
    "GptOss": FEW | {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "Qwen3Next": FEW | QWEN35 | ROUTED | HYBRID | {"shared_expert_intermediate_size": 16},
}  # fmt: skip
TOKENS = torch.arange(60).view(2, 30) * 5 + 3  # no padding, whose embedding is zero
TEXT = [(torch.arange(40)[None] * n + n) % 320 for n in (3, 7, 11)]
W4 = "w4a16(weights=absmax(bits=4, per='channel', group=16))"
SKIP = {"Qwen3Next": ("*.conv1d",)}


def model_of(name: str, **over: object) -> PreTrainedModel:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**MODELS[name] | over)
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # routers and biases start at zero
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(0, 0.3)
    return model


@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_a_quantized_model_is_the_one_with_these_numbers_in_its_tensors(name: str) -> None:
    model = model_of(name)
    apart = prepare_model(model)
    torch.testing.assert_close(apart(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-5)
    small = quantize_module(model, W4, skip=SKIP.get(name, ()))
    expected = copy.deepcopy(model)
    for place, module in expected.named_modules():
        if is_fused(module):
            inside: Any = small.get_submodule(place)
            for projection in ("gate_up_proj", "down_proj"):
                numbers = torch.stack([each.dequantize() for each in inside._modules[projection]])
                whole = numbers.transpose(1, 2) if module.is_transposed else numbers
                module.get_parameter(projection).copy_(whole)
    for place, layer in quantized_layers(small).items():
        if ".experts." not in place:
            expected.get_submodule(place).weight.copy_(layer.dequantize())  # pyright: ignore
    found = small(TOKENS).logits
    torch.testing.assert_close(found, expected(TOKENS).logits, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, model(TOKENS).logits, atol=1e-2)
    assert any(".experts." in each for each in quantized_layers(small))


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [*NAMED, "coarse(scales='static')"])
def test_every_scheme_takes_them(scheme: str) -> None:
    model = model_of("Mixtral")
    found = wakeful.quantization.parse_scheme(scheme)
    small = quantize_module(model, found, calibration=TEXT if found.calibrated else ())
    seen = measure_damage("mixtral", model, {scheme: small}, [TOKENS[:1]])
    assert torch.isfinite(small(TOKENS).logits).all()
    if found.weights is not None:
        experts = seen.layers.filter(module="model.layers.0.mlp.experts.down_proj")
        assert set(experts["position"]) == {"rest", "all"}
        assert experts.drop_nulls("value")["value"].is_finite().all()
        routers = [module for module in small.modules() if type(module).__name__.endswith("Router")]
        assert len(routers) == 2


@pytest.mark.slow
def test_every_expert_has_a_cost() -> None:
    model = model_of("Qwen3Moe")
    small = quantize_module(model, W4)
    found = measure_layer_costs(model, small, [TOKENS[:1]])
    assert {each.name for each in found} == set(quantized_layers(small))


def test_what_is_skipped_stays_one_tensor() -> None:
    model = model_of("Mixtral")
    small = quantize_module(model, "fine", skip=["*.0.mlp.experts", "*.1.mlp.experts.down_proj.*"])
    assert is_fused(small.get_submodule("model.layers.0.mlp.experts"))
    second = small.get_submodule("model.layers.1.mlp.experts")
    assert isinstance(second, Experts)
    kept = second.get_submodule("down_proj.3")
    stored = model.get_submodule("model.layers.1.mlp.experts").get_parameter("down_proj")
    assert type(kept) is nn.Linear
    assert kept.weight.data_ptr() == stored[3].data_ptr()


def test_an_expert_that_no_text_reaches_is_named() -> None:
    model = model_of("Mixtral")
    for layer in model.model.layers:
        layer.mlp.gate.weight.data[1:] = -layer.mlp.gate.weight.data[0]
    with pytest.raises(WakefulError, match=r"never reaches \d+ layers, such as .*\.experts\."):
        quantize_module(model, "w4g128_gptq", calibration=[TEXT[0][:, :1]])
