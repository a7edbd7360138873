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
        sink: s, where e^s is added to the softmax's denominator: (H,), or (B, L, H) to differ by
            query; None for the ordinary softmax.
        keep: mask in place of causality, such as for padding: True where a query sees a key. A
            query that sees nothing gets zeros.

    Raises:
        WakefulError: there is a sink, and no fused kernel gives the log-sum-exp that it needs for
            this dtype and device.
    """
    q, k, v = _to_autocast_dtype(q, k, v)
    num_queries, num_keys = q.shape[1], k.shape[1]
    if keep is None and num_queries == num_keys:  # then kernels can be causal without a mask
        return _run_kernel(q, k, v, sink, keep=None, causal=True, scale=scale)
    if keep is None and num_queries > 1:  # a single query, the last token, sees all keys
        keep = causal_mask(num_queries, num_keys, q.device)
    return _run_kernel(q, k, v, sink, keep=keep, causal=False, scale=scale)


def attend_by_definition(
    q: Float[Tensor, "B L H d"],
    k: Float[Tensor, "B S G d"],
    v: Float[Tensor, "B S G d"],
    weigh: Weigh,
    *,
    scale: float,
    keep: Bool[Tensor, "#B L S"] | None = None,
) -> Float[Tensor, "B L H d"]:
    """Return attention as `attend` does, but with weights of any form, from the whole L × S matrix
    of logits.

    `weigh` takes logits (B, H, L, S) in float32 or wider, −∞ where a query does not see a key, and
    returns the weights. `keep` is True where a query sees a key; None stands for causal attention.
    """
    q, k, v = _to_autocast_dtype(q, k, v)
    if keep is None:
        keep = causal_mask(q.shape[1], k.shape[1], q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        out, _ = _weigh_values(q.to(wide), k.to(wide), v.to(wide), weigh, scale, keep)
    return out.to(q.dtype)


def causal_mask(num_queries: int, num_keys: int, device: torch.device) -> Bool[Tensor, "1 L S"]:
    """Return the causal mask, True where a query sees a key: the keys of its token and of earlier
    ones.

    Every token has a key; the queries are those of the last `num_queries` tokens.
    """
    query_position = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    key_position = torch.arange(num_keys, device=device)
    return (key_position <= query_position).unsqueeze(0)


def explicit_attention(
    q: Float[Tensor, "B L H d"],
    k: Float[Tensor, "B S G d"],
    v: Float[Tensor, "B S G d"],
    *,
    scale: float,
    sink: Float[Tensor, "*queries H"] | None,
    keep: Bool[Tensor, "#B L S"],
) -> tuple[Float[Tensor, "B L H d"], Float[Tensor, "B H L S"]]:
    """Return (attention output, weights) by their definition, with the whole matrix of weights.

    Kernels are tested against this. It computes in the inputs' dtype. `sink` is s, where e^s is
    added to the softmax's denominator; the mask `keep` is True where a query sees a key.
    """
    return _weigh_values(q, k, v, functools.partial(sink_softmax, sink=sink), scale, keep)


def _weigh_values(
    q: Tensor, k: Tensor, v: Tensor, weigh: Weigh, scale: float, keep: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (attention output (B, L, H, d), weights (B, H, L, S)).

    `weigh` makes the weights of the logits q · k times `scale`, which are −∞ where `keep` is False.
    """
    repeats = q.shape[2] // k.shape[2]  # query heads for each key/value head
    k, v = (heads.repeat_interleave(repeats, dim=2) for heads in (k, v))
    logits = torch.einsum("blhd,bshd->bhls", q, k) * scale
    weights = weigh(logits.masked_fill(~keep.unsqueeze(1), -math.inf))
    return torch.einsum("bhls,bshd->blhd", weights, v), weights


def _to_autocast_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the heads in autocast's dtype, if autocast is on. For torch's own kernels autocast
    does this itself, for ours it does not.
    """
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

    The mask `keep` is True where a query sees a key; None is no mask. With `causal`, for as many
    queries as keys, the kernel itself hides later keys.

    Raises:
        WakefulError: our kernel does not support this dtype and device.
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
    # A query that sees nothing gets zeros, but from cuDNN's kernel the mean of the values.
    if keep is not None and q.is_cuda:
        out = out.masked_fill(~keep.any(-1)[:, None, :, None], 0.0)
    return out.transpose(1, 2)


def check_kernel(q: Tensor) -> None:
    """Raise `WakefulError` if no fused kernel returns the log-sum-exp, which a sink needs, for the
    dtype and device of these queries.
    """
    if not has_kernel(q):
        raise WakefulError(
            f"softmax-1 has no fused kernel for {q.dtype} on {q.device.type}: use float32, "
            "bfloat16 or float16 there (float64 runs on the CPU), or model.normalizer = 'softmax'"
        )
