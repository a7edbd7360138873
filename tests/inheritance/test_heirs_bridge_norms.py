"""Bridges where a norm stands between the feed-forward network and the stream."""

import itertools
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from helpers import some_tokens, tiny_decoder
from wakeful.config.schema import BridgeConfig
from wakeful.inheritance.blocks import inherit_blocks
from wakeful.inheritance.bridge import bridge
from wakeful.inheritance.layers import LayerMap
from wakeful.model.decoder import Decoder

LAYERS = LayerMap((0, 3), "named")
TOKENS = some_tokens(9, 11)
SHAPES: list[dict[str, Any]] = [
    {"placement": "peri", "mlp": "geglu"},
    {"placement": "reordered", "mlp": "swiglu", "bias": True},
    {"placement": "peri", "norm": "layernorm", "mlp": "gelu", "bias": True},
    {"placement": "peri", "norm": "rmsnorm_single"},
    {"placement": "reordered", "norm": "layernorm_scaling"},
]


def activations(decoder: Decoder, layer: int) -> dict[str, Tensor]:
    """Return a layer's output (out), its `down`'s input (h) and output (v), and the addend (n)."""
    actual: dict[str, Tensor] = {}
    block = decoder.blocks[layer]
    down, norm = block.get_submodule("mlp.down"), block.get_submodule("mlp_output_norm")
    handles = [
        down.register_forward_hook(lambda _, args, out: actual.update(h=args[0], v=out)),
        norm.register_forward_hook(lambda _m, _args, out: actual.update(n=out)),
        block.register_forward_hook(lambda _m, _args, out: actual.update(out=out[0])),
    ]
    with torch.no_grad():
        decoder.hidden(TOKENS)
    for handle in handles:
        handle.remove()
    return actual


def rows(tensor: Tensor) -> Tensor:
    """Return the tokens that are solved on, all but first ones, (N, _)."""
    return tensor[:, 1:].flatten(0, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("solve", ["output", "down"])
def test_the_matrix_and_then_the_scale_are_least_squares_solutions(
    shape: dict[str, Any],
    solve: Literal["output", "down"],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("wakeful.inheritance.bridge._MIN_COSINE", -2.0)  # never constrained
    options = BridgeConfig(map=solve, ridge=1e-4)
    reference = tiny_decoder(**shape)
    heir = inherit_blocks(reference, LAYERS)
    norm = heir.blocks[0].get_submodule("mlp_output_norm")
    bias = shape.get("bias", False)
    before, y = activations(heir, 0), activations(reference, 2)["out"]
    scale = norm.get_parameter("weight").detach().clone()
    shift = norm.get_parameter("bias").detach() if shape.get("norm") == "layernorm" else 0.0
    v = before["v"]
    centered = v - v.mean(-1, keepdim=True) if shape.get("norm") == "layernorm" else v
    divisor = (centered.square().mean(-1, keepdim=True) + heir.config.norm_eps).sqrt()
    f = v if solve == "output" else before["h"]
    size = f.shape[-1]
    if bias:
        f = torch.cat([f, torch.ones_like(f[..., :1])], -1)
    f, rest = f / divisor, before["out"] - before["n"] + shift
    f, z, target = (rows(part) for part in (f, (y - rest) / scale, y))
    w = 1 / target.norm(dim=1)
    penalty = torch.eye(f.shape[1], dtype=f.dtype)[:size]
    penalty *= (1e-4 * (f * w.unsqueeze(1)).square().sum(0)[:size].mean()).sqrt()
    solution = torch.linalg.lstsq(
        torch.cat([f * w.unsqueeze(1), penalty]),
        torch.cat([z * w.unsqueeze(1), z.new_zeros(size, z.shape[1])]),
    ).solution

    (actual,) = bridge(heir, reference, LAYERS, TOKENS, options)

    with torch.no_grad():
        outputs = rows(activations(heir, 0)["v"])
        old = rows(v) if solve == "output" else rows(before["h"])
        expected = old @ solution[:size] + (solution[size] if bias else 0)
    torch.testing.assert_close(outputs, expected, rtol=1e-6, atol=1e-8)
    # The scale: the least of what is left, one number a channel or one for all.
    now = activations(heir, 0)
    new = norm.get_parameter("weight").detach()
    n = rows((now["n"] - shift) / new) * w.unsqueeze(1)
    z = rows(y - (now["out"] - now["n"]) - shift) * w.unsqueeze(1)
    if len(new) == 1:
        n, z = n.reshape(-1, 1), z.reshape(-1, 1)
    minimum = torch.stack(
        [torch.linalg.lstsq(n[:, [c]], z[:, [c]]).solution.squeeze() for c in range(n.shape[1])]
    )
    torch.testing.assert_close(new, minimum.detach(), rtol=1e-7, atol=1e-9)
    # What is said of it is what the heir does on the same text.
    x, y = (rows(part) for part in (now["out"], y))
    for bridged, out in ((actual.error, x), (actual.plain, rows(before["out"]))):
        error = ((out - y).norm(dim=1) * w).square().sum() / (y.norm(dim=1) * w).square().sum()
        assert bridged == pytest.approx(error.item())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_only_the_matrix_and_its_norm_change(shape: dict[str, Any]) -> None:
    reference = tiny_decoder(**shape)
    heir = inherit_blocks(reference, LAYERS)
    before = {name: p.clone() for name, p in heir.named_parameters()}
    originals = {name: p.clone() for name, p in reference.named_parameters()}
    bridge(heir, reference, LAYERS, TOKENS)
    changed = {name for name, p in heir.named_parameters() if not torch.equal(p, before[name])}
    expected = {"mlp.down.weight", "mlp_output_norm.weight"}
    expected |= {"mlp.down.bias"} if shape.get("bias") else set()
    assert changed == {f"blocks.0.{name}" for name in expected}
    for name, parameter in reference.named_parameters():
        assert torch.equal(parameter, originals[name])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_layers_that_add_nothing_are_left_out_without_a_trace(shape: dict[str, Any]) -> None:
    reference = tiny_decoder(**shape)
    with torch.no_grad():
        for layer, half in itertools.product((1, 2), ("attention", "mlp")):
            for parameter in reference.get_submodule(
                f"blocks.{layer}.{half}_output_norm"
            ).parameters():
                parameter.zero_()
    for solve in ("output", "down"):
        heir = inherit_blocks(reference, LAYERS)
        options = BridgeConfig(map=solve, ridge=0.0)
        (actual,) = bridge(heir, reference, LAYERS, some_tokens(40, 11), options)
        assert actual.plain == pytest.approx(0, abs=1e-12)
        assert actual.error == pytest.approx(0, abs=1e-12)
        torch.testing.assert_close(heir(TOKENS), reference(TOKENS), rtol=1e-7, atol=1e-7)


def test_the_first_token_apart_comes_out_in_the_references_direction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "wakeful.inheritance.bridge._MIN_COSINE", 2.0
    )  # constrained whatever comes out
    reference = tiny_decoder(placement="reordered")
    same = TOKENS.clone()
    same[:, 0] = 1  # all first tokens alike: their mean is each
    heir = inherit_blocks(reference, LAYERS)
    before = heir.blocks[0].get_submodule("mlp_output_norm").get_parameter("weight").clone()
    bridge(heir, reference, LAYERS, same, BridgeConfig(ridge=1e-4))
    actual: dict[str, Tensor] = {}
    for name, decoder in (("heir", heir), ("reference", reference)):
        layer = 0 if name == "heir" else 2
        handle = decoder.blocks[layer].register_forward_hook(
            lambda _m, _a, out, name=name: actual.update({name: out[0][0, 0]})
        )
        with torch.no_grad():
            decoder.hidden(same)
        handle.remove()
    block = heir.blocks[0]
    down: list[Tensor] = []
    handle = block.get_submodule("mlp.down").register_forward_hook(
        lambda _m, _a, out: down.append(out[0, 0])
    )
    with torch.no_grad():
        heir.hidden(same)
        plain = inherit_blocks(reference, LAYERS)
        added: list[Tensor] = []
        put_out: list[Tensor] = []
        plain.blocks[0].get_submodule("mlp_output_norm").register_forward_hook(
            lambda _m, _a, out: added.append(out[0, 0])
        )
        plain.blocks[0].register_forward_hook(lambda _m, _a, out: put_out.append(out[0][0, 0]))
        plain.hidden(same)
    handle.remove()
    y, x = actual["reference"], put_out[0]
    expected = (y * (x.norm() / y.norm()).sqrt() - (x - added[0])) / before
    cosine = torch.cosine_similarity(down[0], expected, dim=0)
    assert cosine.item() == pytest.approx(1.0, abs=1e-9)
