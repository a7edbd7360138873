"""The values that layers generate, beside those that attention mixes."""

import pytest
import torch

from helpers import tiny_decoder
from wakeful.probes.attention import Values
from wakeful.probes.watch import watch
from wakeful_papers.probes.generated import GeneratedValues


def test_generated_values_are_the_projections_own_whatever_the_route_mixes() -> None:
    decoder = tiny_decoder(route="resformer").eval()
    tokens = torch.randint(decoder.config.vocab_size, (3, 7))
    raw: dict[int, torch.Tensor] = {}
    hooks = [
        block.attention.value.register_forward_hook(
            lambda _m, _i, output, layer=layer: raw.__setitem__(layer, output.flatten(2))
        )
        for layer, block in enumerate(decoder.blocks)
    ]
    with torch.no_grad(), watch(decoder, GeneratedValues(decoder), Values()) as seen:
        decoder.hidden(tokens)
    for hook in hooks:
        hook.remove()
    for layer, values in raw.items():
        moments = values.mT @ values / 7
        expected = torch.linalg.eigvalsh(moments)[:, -1].mean()
        rows = seen.frame.filter(metric="generated_eigenvalue", layer=layer)
        assert rows["value"].item() == pytest.approx(float(expected), rel=1e-4)
        assert rows["position"].item() == "1"
    mixed = {
        row["layer"]: row["value"]
        for row in seen.frame.filter(metric="value_eigenvalue", variant="paper").to_dicts()
    }
    own = {
        row["layer"]: row["value"]
        for row in seen.frame.filter(metric="generated_eigenvalue").to_dicts()
    }
    assert mixed[0] == pytest.approx(own[0], rel=1e-4)  # nothing is added to the first layer's
    assert all(abs(mixed[layer] / own[layer] - 1) > 1e-3 for layer in own if layer)
    assert not any(block.attention.value._forward_hooks for block in decoder.blocks)
