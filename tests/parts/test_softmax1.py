"""The public softmax-1 attention in both layouts, against its equation."""

import math

import pytest
import torch
from torch import Tensor

from wakeful.parts.softmax1 import softmax1_attention

B, H, G, D = 2, 4, 2, 6


def by_equation(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, scale: float, keep: Tensor):
    """Return e^x / (e^s + Σ e^x) · v of heads (B, H, L, d), with nothing fused or shifted."""
    k, v = (heads.repeat_interleave(H // G, 1) for heads in (k, v))
    e = torch.exp(q @ k.mT * scale).masked_fill(~keep.unsqueeze(1), 0.0)
    s = torch.exp(sink).view(1, H, 1, 1) if sink.dim() == 1 else torch.exp(sink).mT.unsqueeze(-1)
    return e / (s + e.sum(-1, keepdim=True)) @ v


def drawn(length: int, keys: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(length)
    shapes = [(B, H, length, D), (B, G, keys, D), (B, G, keys, D)]
    made = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return [heads.requires_grad_() for heads in made]


@pytest.mark.parametrize("sink", ["none", "heads", "queries"])
@pytest.mark.parametrize("causal", ["causal", "all", "keep"])
@pytest.mark.parametrize(("length", "keys"), [(1, 1), (1, 5), (7, 7), (3, 7)])
@pytest.mark.parametrize("scale", [None, 0.7])
def test_outputs_and_all_gradients_are_the_equation(
    sink: str, causal: str, length: int, keys: int, scale: float | None
) -> None:
    heads = drawn(length, keys)
    s = torch.linspace(-1, 2, H, dtype=torch.float64)
    s = s.expand(B, length, H).clone() if sink == "queries" else s
    s.requires_grad_(sink != "none")
    keep = torch.ones(1, length, keys, dtype=torch.bool)
    if causal == "causal":
        keep = keep.tril(keys - length)
    if causal == "keep":
        keep = torch.rand(B, length, keys, generator=torch.Generator().manual_seed(0)) < 0.6
    options = {"causal": causal == "causal", "keep": keep if causal == "keep" else None}
    zeros = torch.zeros(H, dtype=torch.float64)
    wanted = by_equation(
        *heads, zeros if sink == "none" else s, D**-0.5 if scale is None else scale, keep
    )
    given = None if sink == "none" else s
    inputs = [*heads, *([] if sink == "none" else [s])]
    upstream = torch.randn(wanted.shape, dtype=torch.float64)
    gradients = torch.autograd.grad(wanted, inputs, upstream)
    for layout in ("BHLd", "BLHd"):
        swap = layout == "BLHd"
        q, k, v = (x.transpose(1, 2) if swap else x for x in heads)
        out = softmax1_attention(q, k, v, scale, given, layout=layout, **options)
        out = out.transpose(1, 2) if swap else out
        torch.testing.assert_close(out, wanted, rtol=0, atol=1e-12)
        for got, want in zip(torch.autograd.grad(out, inputs, upstream), gradients, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


def test_a_sink_of_minus_infinity_is_the_softmax() -> None:
    q, k, v = drawn(5, 5)
    out = softmax1_attention(q, k, v, sink=torch.full((H,), -math.inf, dtype=torch.float64))
    stock = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(out, stock, rtol=0, atol=1e-12)


def test_another_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="layout='HBLd'"):
        softmax1_attention(*drawn(2, 2), layout="HBLd")


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
def test_compiling_breaks_no_graph() -> None:
    heads = [x.detach().float().requires_grad_() for x in drawn(7, 7)]
    compiled = torch.compile(softmax1_attention, fullgraph=True, backend="aot_eager")
    found, wanted = compiled(*heads), softmax1_attention(*heads)
    torch.testing.assert_close(found, wanted)
    upstream = torch.randn_like(wanted)
    for got, want in zip(
        torch.autograd.grad(found, heads, upstream),
        torch.autograd.grad(wanted, heads, upstream),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
