"""Attention over heads: the one place that picks a kernel.

Shapes: B batch, L queries, S keys (S ≥ L: the queries are the last L of the S tokens), H query
heads, G key/value heads, d head width. Heads come as (B, L, H, d), the layout a projection leaves.

The ordinary softmax is `scaled_dot_product_attention`. A sink (softmax-1, or an s for each head or
for each head and query, see `wakeful.normalizers`) is `wakeful.parts.softmax1`.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.parts.softmax1 import attend_with_sink, has_kernel, sink_softmax

Weigh = Callable[[Tensor], Tensor]
"""Makes weights (…, L, L) of logits, those masked −∞."""


def attend(
    q: Float[Tensor, "B L H d"],
    k: Float[Tensor, "B S G d"],
    v: Float[Tensor, "B S G d"],
    *,
    scale: float,
    sink: Float[Tensor, "*queries H"] | None = None,
    keep: Bool[Tensor, "#B L S"] | None = None,
) -> Float[Tensor, "B L H d"]:
    """Return causal attention of the last L of S tokens over all S.

    Args:
        q, k, v: heads in one dtype; G divides H and each key head serves H / G query heads.
        scale: factor of the logits q · k.
        sink: s, where e^s is added to the denominator: (H,), or (B, L, H) to differ by query; None
            for the ordinary softmax.
        keep: mask of the pairs that may attend, in place of causality, such as for padding. A
            query that sees nothing gets zeros.

    Raises:
        WakefulError: no fused kernel gives the log-sum-exp for this dtype and device.
    """
    q, k, v = _to_autocast_dtype(q, k, v)
    queries, keys = q.shape[1], k.shape[1]
    # Kernels are causal without a mask only where queries and keys are as many.
    if keep is None and queries == keys:
        return _run_kernel(q, k, v, sink, None, True, scale)
    # A single query, the last token, sees all keys: it needs no mask.
    if keep is None and queries > 1:
        keep = causal_mask(queries, keys, q.device)
    return _run_kernel(q, k, v, sink, keep, False, scale)


def attend_by_definition(
    q: Float[Tensor, "B L H d"],
    k: Float[Tensor, "B S G d"],
    v: Float[Tensor, "B S G d"],
    weigh: Weigh,
    *,
    scale: float,
    keep: Bool[Tensor, "#B L S"] | None = None,
) -> Float[Tensor, "B L H d"]:
    """Return attention as `attend` does, for weights of any form, by the L × S matrix.

    `weigh` makes weights (B, H, L, S) of masked logits (−∞ for no attention) in float32 or wider.
    """
    q, k, v = _to_autocast_dtype(q, k, v)
    if keep is None:
        keep = causal_mask(q.shape[1], k.shape[1], q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        out, _ = _weigh_values(q.to(wide), k.to(wide), v.to(wide), weigh, scale, keep)
    return out.to(q.dtype)


def causal_mask(queries: int, keys: int, device: torch.device) -> Bool[Tensor, "1 L S"]:
    """Return a mask, True where a query sees a key: its own and earlier ones. The queries are the
    last of the tokens that the keys are of.
    """
    position = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    key = torch.arange(keys, device=device)
    return (key <= position).unsqueeze(0)


def explicit_attention(
    q: Float[Tensor, "B L H d"],
    k: Float[Tensor, "B S G d"],
    v: Float[Tensor, "B S G d"],
    *,
    scale: float,
    sink: Float[Tensor, "*queries H"] | None,
    keep: Bool[Tensor, "#B L S"],
) -> tuple[Float[Tensor, "B L H d"], Float[Tensor, "B H L S"]]:
    """Return the attention output and weights by their definition, with the L × S matrix made.

    The law that the kernels are tested against; precision is the inputs' own.
    """
    return _weigh_values(q, k, v, functools.partial(sink_softmax, sink=sink), scale, keep)


def _weigh_values(
    q: Tensor, k: Tensor, v: Tensor, weigh: Weigh, scale: float, keep: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the attention output (B, L, H, d) and its weights (B, H, L, S), which `weigh` makes of
    the logits of pairs in `keep`, −∞ elsewhere.
    """
    repeats = q.shape[2] // k.shape[2]
    k, v = (heads.repeat_interleave(repeats, dim=2) for heads in (k, v))
    logits = torch.einsum("blhd,bshd->bhls", q, k) * scale
    weights = weigh(logits.masked_fill(~keep.unsqueeze(1), -math.inf))
    return torch.einsum("bhls,bshd->blhd", weights, v), weights


def _to_autocast_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the heads in autocast's dtype, if it is on: what autocast does for stock kernels."""
    device_type = q.device.type
    if torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
        return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def _run_kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    keep: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    """Return attention (B, L, H, d) by a fused kernel: torch's own, or ours for a sink.

    `keep` is the mask, None for none; with `causal`, kernels mask later keys without one.
    """
    if sink is not None:
        check_kernel(q)
        return attend_with_sink(q, k, v, sink, keep, causal, scale)
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k.transpose(1, 2),
        v.transpose(1, 2),
        attn_mask=None if keep is None else keep.unsqueeze(1),
        is_causal=causal,
        scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )
    if keep is not None and q.is_cuda:  # cuDNN's gives a query that sees nothing the values' mean
        out = out.masked_fill(~keep.any(-1)[:, None, :, None], 0.0)
    return out.transpose(1, 2)


def check_kernel(q: Tensor) -> None:
    """Raise `WakefulError` if no fused kernel returns the log-sum-exp for these queries."""
    if not has_kernel(q):
        raise WakefulError(
            f"softmax-1 has no fused kernel for {q.dtype} on {q.device.type}: use float32, "
            "bfloat16 or float16 there (float64 runs on the CPU), or model.normalizer = 'softmax'"
        )
