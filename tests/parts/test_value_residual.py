"""Value residuals in one file: the library's routes, and SVFormer's decoding."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from wakeful.config.model import ModelConfig
from wakeful.model.decoder import Decoder
from wakeful.parts.value_residual import SharedValueCache, ValueResidual, add_value_residuals
from wakeful.routes.base import FIRST_VALUE, QKV

B, L, H, D = 2, 5, 2, 4


@pytest.mark.parametrize(
    ("mode", "options", "route"),
    [("identity", {}, "resformer"),
     ("constant", {"scale": 5.0}, 'resformer(mode="constant", scale=5.0)'),
     ("learnable", {"init": (0.3, 0.9)}, 'resformer(mode="learnable", init=(0.3, 0.9))')],
)  # fmt: skip
def test_values_and_gradients_are_the_routes_to_the_bit(
    mode: str, options: dict[str, Any], route: str
) -> None:
    config = ModelConfig(
        vocab_size=11, width=H * D, mlp_width=12, num_layers=3, num_heads=H, route=route
    )
    routes = Decoder(config).double()
    reference = routes.plan.routes[2][0]
    part = ValueResidual(2, mode, **options).double()
    first, value = (torch.randn(B, L, H, D, dtype=torch.float64) for _ in range(2))
    inputs = [x.requires_grad_() for x in (first, value)]
    mixed, handed_on = part(value, first)
    qkv = QKV(value, value, value)
    expected = reference.mix(2, value, qkv, {FIRST_VALUE: first}).v
    assert handed_on is first
    assert torch.equal(mixed, expected)
    parameters = [*part.parameters()], [*reference.parameters()]
    upstream = torch.randn_like(mixed)
    found = torch.autograd.grad(mixed, [*inputs, *parameters[0]], upstream)
    wanted = torch.autograd.grad(expected, [*inputs, *parameters[1]], upstream)
    for got, want in zip(found, wanted, strict=True):
        assert torch.equal(got.flatten(), (want[1] if want.shape == (2, 2) else want).flatten())


class Attention(nn.Module):
    """A block's attention as others write it, with the three lines in it."""

    def __init__(self, layer: int, mode: str) -> None:
        super().__init__()
        width = H * D
        self.layer = layer
        self.q, self.k = nn.Linear(width, width), nn.Linear(width, width)
        self.v = None if mode == "shared" and layer else nn.Linear(width, width)
        self.value_residual = ValueResidual(layer, mode)

    def forward(
        self, x: Tensor, first: Tensor | None, cache: SharedValueCache | None = None
    ) -> tuple[Tensor, Tensor]:
        q, k, v = (
            None if part is None else part(x).unflatten(-1, (H, D)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        v, first = self.value_residual(v, first)
        if cache is not None:
            k, v = cache.update(self.layer, k, v)
        offset = k.shape[2] - q.shape[2]
        keep = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(offset)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return x + out.transpose(1, 2).flatten(2), first


def run(layers: Any, x: Tensor, cache: SharedValueCache | None = None) -> Tensor:
    first = None
    for layer in layers:
        x, first = layer(x, first, cache)
    return x


def test_decoding_with_shared_values_is_the_whole_pass() -> None:
    torch.manual_seed(0)
    layers = [Attention(layer, "shared").double() for layer in range(4)]
    x = torch.randn(B, L, H * D, dtype=torch.float64)
    cache = SharedValueCache()
    pieces = [run(layers, piece, cache) for piece in x.split((2, 1, 2), dim=1)]
    torch.testing.assert_close(torch.cat(pieces, 1), run(layers, x), rtol=0, atol=1e-12)
    keys_and_values = 2 * len(layers) * B * L * H * D * 8
    assert cache.nbytes() == keys_and_values * (len(layers) + 1) // (2 * len(layers))


@pytest.mark.parametrize("mode", ["identity", "constant", "learnable", "shared"])
def test_the_first_values_reach_every_layer(mode: str) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(Attention(layer, mode) for layer in range(3)).double()
    run(layers, torch.randn(B, L, H * D, dtype=torch.float64)).sum().backward()
    assert all(parameter.grad is not None for parameter in layers.parameters())


def test_what_cannot_be_mixed_is_refused() -> None:
    value = torch.zeros(1)
    with pytest.raises(ValueError, match="is not one of identity"):
        ValueResidual(1, "plus")
    with pytest.raises(ValueError, match="layer 1 needs the first layer's values"):
        ValueResidual(1)(value)
    with pytest.raises(ValueError, match="layer 1 has no values"):
        ValueResidual(1)(None, value)
    with pytest.raises(ValueError, match="the first layer has no values"):
        ValueResidual(0, "shared")(None)


class Mixed(nn.Module):
    """Attention whose projection makes queries, keys and values at once, or values alone."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        width = H * D
        self.query_key = nn.Linear(width, 2 * width)
        self.value = nn.Linear(width, 3 * width if fused else width)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        out = self.value(x)
        q, k, v = (out if self.fused else torch.cat([self.query_key(x), out], -1)).chunk(3, -1)
        heads = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in (q, k, v))
        return x + F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2)


@pytest.mark.parametrize("mode", ["identity", "constant", "learnable"])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_hooks_do_what_the_lines_in_an_attention_do(
    mode: str, fused: bool, checkpointed: bool
) -> None:
    torch.manual_seed(0)
    width = H * D
    layers = nn.ModuleList(Mixed(fused) for _ in range(3)).double()
    values = slice(2 * width, 3 * width) if fused else slice(0, width)
    plain = [copy.deepcopy(layer) for layer in layers]
    add_value_residuals([layer.value for layer in layers], mode, columns=values if fused else None)
    layers.double()
    x = torch.randn(B, L, width, dtype=torch.float64)
    y = x
    for layer in layers:
        y = checkpoint(layer, y, use_reentrant=False) if checkpointed else layer(y)
    first, z = None, x
    for layer, hooked in zip(plain, layers, strict=True):
        out = layer.value(z)
        mixed, first = hooked.value.value_residual(out[..., values], first)
        out = torch.cat([out[..., : values.start], mixed], -1) if fused else mixed
        q, k, v = (out if fused else torch.cat([layer.query_key(z), out], -1)).chunk(3, -1)
        heads = (part.unflatten(-1, (H, D)).transpose(1, 2) for part in (q, k, v))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        z = z + attended.transpose(1, 2).flatten(2)
    assert torch.equal(y, z)
    y.square().sum().backward()
    z.square().sum().backward()
    for layer, other in zip(layers, plain, strict=True):
        torch.testing.assert_close(
            layer.value.weight.grad, other.value.weight.grad, rtol=1e-12, atol=1e-12
        )


def test_what_hooks_cannot_do_is_refused() -> None:
    projections = [nn.Linear(2, 2), nn.Linear(2, 2)]
    with pytest.raises(ValueError, match="shared values leave projections out"):
        add_value_residuals(projections, "shared")
    add_value_residuals(projections)
    with pytest.raises(ValueError, match="layer 0 has a value residual already"):
        add_value_residuals(projections)
