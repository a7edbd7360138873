"""What layers cost, by models that are quantized in them alone."""

import pytest
import torch
from test_convert import llama

from helpers import some_tokens, tiny_decoder
from wakeful.errors import WakefulError
from wakeful.estimates import mean_and_error
from wakeful.probes.running import logits_of
from wakeful.quantization import quantize_module, quantized_layers
from wakeful.quantization.sensitivity import measure_layer_costs

W4 = "w4"
TEXT = [some_tokens(1, 14, seed=n) for n in range(3)]


@torch.inference_mode()
def losses(model: torch.nn.Module) -> list[float]:
    found = [logits_of(model, each)[0] for each in TEXT]
    cross = torch.nn.functional.cross_entropy
    return [float(cross(y[:-1], each[0, 1:])) for y, each in zip(found, TEXT, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("make", [
    lambda: tiny_decoder(dtype=torch.float32).eval(), llama,
    lambda: tiny_decoder(dtype=torch.float32, depth="mudd").eval(),  # its blocks read all before
])  # fmt: skip
def test_costs_are_those_of_models_quantized_in_one_layer(make) -> None:
    model = make()
    small = quantize_module(model, W4)
    layers, before, whole = list(quantized_layers(small)), losses(model), losses(small)
    found = {each.name: each for each in measure_layer_costs(model, small, TEXT)}
    assert list(found) == sorted(layers, key=lambda name: -found[name].alone[0])
    assert losses(small) == whole  # all is as it was
    for name in layers:
        one = losses(quantize_module(model, W4, skip=[each for each in layers if each != name]))
        alone = mean_and_error([a - b for a, b in zip(one, before, strict=True)])
        assert found[name].alone == pytest.approx(alone, abs=1e-5)
        assert found[name].kl[0] > 0


def test_a_text_without_a_prediction_is_refused() -> None:
    model = llama()
    with pytest.raises(WakefulError, match="no token to predict; make them longer"):
        measure_layer_costs(model, quantize_module(model, W4), [TEXT[0][:, :1]])
