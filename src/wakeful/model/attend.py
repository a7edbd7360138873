"""Attention over heads: the one place that picks a kernel.

Shapes: B batch, L queries, S keys (S ≥ L: the queries are the last L of the S tokens), H query
heads, G key/value heads, d head width. Heads come as (B, L, H, d), the layout a projection leaves.

The ordinary softmax is `scaled_dot_product_attention`. A sink (softmax-1, or an s for each head or
for each head and query, see `wakeful.normalizers`) uses the same fused kernels and corrects their
log-sum-exp:

    forward    lse' = log(e^lse + e^s)            out' = out · e^{lse − lse'}
    backward   the stock backward kernel, given (out', lse') for (out, lse); it recomputes the
               weights as e^{x − lse'} and uses D = Σ dO ∘ out', which is softmax-1's Jacobian
               ds = − e^{s − lse'} · Σ dO ∘ out', summed over the queries that share s

so it costs one more pass over the output and never makes an L × S matrix. The kernel is the one
that torch's own attention uses: cuDNN's on Hopper and Blackwell, else flash, else the
memory-efficient one.
"""

import functools
import math
from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.normalizers.base import by_query, sink_softmax
from wakeful.tracing import differentiate, is_differentiated_again, is_transformed

_aten = torch.ops.aten
Layout = Literal["BHLd", "BLHd"]
Weigh = Callable[[Tensor], Tensor]
"""Makes weights (…, L, L) of logits, those masked −∞."""


def attend(
    q: Float[Tensor, "B L H d"],
    k: Float[Tensor, "B S G d"],
    v: Float[Tensor, "B S G d"],
    *,
    scale: float,
    sink: Float[Tensor, "*queries H"] | None = None,
    prefix: int = 0,
    keep: Bool[Tensor, "#B L S"] | None = None,
    copies: int = 1,
) -> Float[Tensor, "B L H d"]:
    """Return causal attention of the last L of S tokens over all S.

    Args:
        q, k, v: heads in one dtype; G divides H and each key head serves H / G query heads.
        scale: what the logits q · k are multiplied by.
        sink: s for each query head, or (B, L, H) for each query too: the logarithm of what is added
            to the denominator; None for the ordinary softmax.
        prefix: the first `prefix` tokens see each other in both directions (relaxed causal mask).
        keep: the pairs that may see each other, for what causality and `prefix` cannot say
            (padding); it replaces both. A query that sees nothing gets zeros.
        copies: the keys are this many sequences of S / copies tokens, each of which starts at
            position 0.

    Raises:
        WakefulError: no fused kernel gives the log-sum-exp for this dtype and device.
    """
    q, k, v = _one_dtype(q, k, v)
    queries, keys = q.shape[1], k.shape[1]
    if keep is None and copies == 1 and queries == keys:
        out = _kernel(q, k, v, sink, None, True, scale)
        if prefix > 1:
            first = slice(0, min(prefix, keys))
            sink = sink[:, first] if sink is not None and sink.dim() == 3 else sink
            relaxed = _kernel(q[:, first], k[:, first], v[:, first], sink, None, False, scale)
            out = torch.cat([relaxed, out[:, relaxed.shape[1] :]], dim=1)
        return out
    if keep is None and (copies > 1 or queries > 1):
        keep = _causal(q, k, prefix, copies)
    return _kernel(q, k, v, sink, keep, False, scale)


def softmax1_attention(
    q: Float[Tensor, "B *_ d"],
    k: Float[Tensor, "B *_ d"],
    v: Float[Tensor, "B *_ d"],
    scale: float | None = None,
    sink: Float[Tensor, "*queries H"] | None = None,
    *,
    layout: Layout = "BHLd",
    causal: bool = True,
    keep: Bool[Tensor, "#B L S"] | None = None,
) -> Float[Tensor, "B *_ d"]:
    """Return attention with weights e^{x_i} / (e^s + Σ_j e^{x_j}), softmax-1 where s = 0.

    From Attention to Activation, eq. 1, for training loops of your own: it takes the place of
    `scaled_dot_product_attention`, with its derivatives, and torch.compile sees through it.

    Args:
        q, k, v: heads in one dtype, of L queries and S keys; key heads serve equal groups of query
            heads, and the queries are the last L of the S tokens.
        scale: what the logits q · k are multiplied by; None for 1 / √d.
        sink: s for each query head (H), or (B, L, H) for each query too, learned where it requires
            gradients; None for 0.
        layout: order of the axes: "BHLd", as `scaled_dot_product_attention` takes them, or "BLHd",
            as a projection leaves them. The result has the same.
        causal: whether a query sees no later key.
        keep: the pairs that may see each other, in place of `causal`. A query that sees nothing
            gets zeros.

    Raises:
        WakefulError: the layout is another, or no fused kernel serves this dtype and device.
    """
    if layout not in get_args(Layout):
        raise WakefulError(f"layout={layout!r} is not one of {', '.join(get_args(Layout))}")
    if layout == "BHLd":
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    sink = q.new_zeros(q.shape[2]) if sink is None else sink
    if causal or keep is not None:
        out = attend(q, k, v, scale=scale, sink=sink, keep=keep)
    else:
        out = attend_with_sink(*_one_dtype(q, k, v), sink, None, False, scale)
    return out.transpose(1, 2) if layout == "BHLd" else out


def attend_by_definition(
    q: Float[Tensor, "B L H d"],
    k: Float[Tensor, "B S G d"],
    v: Float[Tensor, "B S G d"],
    weigh: Weigh,
    *,
    scale: float,
    prefix: int = 0,
    keep: Bool[Tensor, "#B L S"] | None = None,
    copies: int = 1,
) -> Float[Tensor, "B L H d"]:
    """Return what `attend` does for weights of any form, which no fused kernel knows.

    `weigh` makes weights (B, H, L, S) of logits, in float32 at least, where those masked are −∞.
    """
    q, k, v = _one_dtype(q, k, v)
    keep = _causal(q, k, prefix, copies) if keep is None else keep
    exact = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        out, _ = _weighted(q.to(exact), k.to(exact), v.to(exact), weigh, scale, keep)
    return out.to(q.dtype)


def _causal(q: Tensor, k: Tensor, prefix: int, copies: int) -> Bool[Tensor, "1 L S"]:
    keep = causal_mask(q.shape[1], k.shape[1] // copies, prefix, q.device)
    return keep.repeat(1, 1, copies) if copies > 1 else keep


def causal_mask(
    queries: int, keys: int, prefix: int, device: torch.device
) -> Bool[Tensor, "1 L S"]:
    """Return which of `keys` tokens each of the last `queries` of them sees."""
    position = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    key = torch.arange(keys, device=device)
    mask = key <= position
    if prefix > 1:
        mask |= (position < prefix) & (key < prefix)
    return mask.unsqueeze(0)


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
    return _weighted(q, k, v, functools.partial(sink_softmax, sink=sink), scale, keep)


def _weighted(
    q: Tensor, k: Tensor, v: Tensor, weigh: Weigh, scale: float, keep: Tensor
) -> tuple[Tensor, Tensor]:
    repeats = q.shape[2] // k.shape[2]
    k, v = (heads.repeat_interleave(repeats, dim=2) for heads in (k, v))
    logits = torch.einsum("blhd,bshd->bhls", q, k) * scale
    weights = weigh(logits.masked_fill(~keep.unsqueeze(1), -math.inf))
    return torch.einsum("bhls,bshd->blhd", weights, v), weights


def _one_dtype(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Bring heads to autocast's dtype, as autocast does for the stock kernels."""
    kind = q.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        return q.to(dtype), k.to(dtype), v.to(dtype)
    return q, k, v


def _kernel(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    keep: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    if sink is not None:
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


class _SinkAttention(torch.autograd.Function):
    """The fused kernels with a sink. What is not a kernel stays in view of torch.compile."""

    @staticmethod
    def forward(q, k, v, sink, keep, causal, scale):
        ahead, _ = _stock_kernels(q, keep)
        out, lse = ahead(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), keep, causal, scale
        )
        sink = by_query(sink).to(lse.dtype)
        if keep is not None:
            # Kernels disagree about a query that sees nothing; its output is zero by definition.
            blind = ~keep.any(-1).unsqueeze(1)
            lse = lse.masked_fill(blind, -math.inf)
            out = out.masked_fill(blind.unsqueeze(-1), 0.0)
        total = torch.logaddexp(lse, sink)
        remainder = torch.sigmoid(lse - sink)  # e^{lse − lse'}, where lse' is not rounded
        if keep is not None:
            empty = total == -math.inf  # then the output and all e^{x − lse'} are zero
            remainder = remainder.masked_fill(empty, 0.0)
            total = total.masked_fill(empty, math.inf)
        out = out * remainder.unsqueeze(-1).to(out.dtype)
        return out.transpose(1, 2), total

    @staticmethod
    def setup_context(ctx, inputs, output):
        *tensors, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, *grads):
        q, k, v, sink, keep, out, lse = ctx.saved_tensors
        grad = grads[0]
        if is_differentiated_again():
            definition = functools.partial(
                _sink_by_definition, keep=keep, causal=ctx.causal, scale=ctx.scale
            )
            return *differentiate(definition, (q, k, v, sink), grad), None, None, None
        _, back = _stock_kernels(q, keep)
        grad_heads = back(
            grad.transpose(1, 2), q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
            out.transpose(1, 2), lse, keep, ctx.causal, ctx.scale,
        )  # fmt: skip
        grad_sink = None
        if ctx.needs_input_grad[3]:
            inner = torch.linalg.vecdot(grad.to(lse.dtype), out.to(lse.dtype)).transpose(1, 2)
            shared = -torch.exp(by_query(sink).to(lse.dtype) - lse) * inner
            grad_sink = shared.transpose(1, 2) if sink.dim() == 3 else shared.sum((0, 2))
            grad_sink = grad_sink.to(sink.dtype)
        return *(x.transpose(1, 2) for x in grad_heads), grad_sink, None, None, None


def attend_with_sink(
    q: Float[Tensor, "B L H d"],
    k: Float[Tensor, "B S G d"],
    v: Float[Tensor, "B S G d"],
    sink: Float[Tensor, "*queries H"],
    keep: Bool[Tensor, "#B L S"] | None,
    causal: bool,
    scale: float,
) -> Float[Tensor, "B L H d"]:
    """Return attention with a sink, of which every query sees all keys where nothing hides them.

    The kernels know one derivative of one batch. Inside `torch.func`, and for second derivatives,
    attention is computed by its definition.
    """
    if is_transformed():
        return _sink_by_definition(q, k, v, sink, keep, causal, scale)
    return sink_attention(q, k, v, sink, keep, causal, scale)[0]


def _sink_by_definition(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor,
    keep: Tensor | None,
    causal: bool,
    scale: float,
) -> Tensor:
    queries, keys = q.shape[1], k.shape[1]
    if keep is None and causal:
        keep = causal_mask(queries, keys, 0, q.device)
    elif keep is None:
        keep = torch.ones(1, queries, keys, dtype=torch.bool, device=q.device)
    weigh = functools.partial(sink_softmax, sink=sink)
    return attend_by_definition(q, k, v, weigh, scale=scale, keep=keep)


def sink_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor,
    keep: Tensor | None,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return attention with a sink: out (B, L, H, d) and its log-sum-exp lse' (B, H, L).

    `keep` is a boolean mask (1 or B, L, S). The lse is float32, float64 for float64 inputs, and
    carries no gradient.
    """
    return _SinkAttention.apply(q, k, v, sink, keep, causal, scale)  # pyright: ignore


def _stock_kernels(q: Tensor, keep: Tensor | None):
    """Choose the stock forward and backward kernels that share a log-sum-exp."""
    kind, dtype, length, width = q.device.type, q.dtype, q.shape[1], q.shape[-1]
    if kind == "cpu":
        return _cpu_forward, _cpu_backward
    if kind == "cuda":
        half = dtype in (torch.float16, torch.bfloat16)
        plain = half and keep is None and width % 8 == 0
        if plain and width <= 128 and length > 1 and _cudnn_leads(q.device.index):
            return _cudnn_forward, _cudnn_backward
        if plain and width <= 256 and _has_flash(q.device.index):
            return _flash_forward, _flash_backward
        if half or dtype == torch.float32:
            return _efficient_forward, _efficient_backward
    raise WakefulError(
        f"softmax-1 has no fused kernel for {dtype} on {kind}: use float32, bfloat16 or float16 "
        "there (float64 runs on the CPU), or model.normalizer = 'softmax'"
    )


@torch.compiler.assume_constant_result
def _cudnn_leads(index: int | None) -> bool:
    """Return True if torch's own attention prefers cuDNN's kernel on this GPU: Hopper and Blackwell
    of data centers.
    """
    return (
        torch.version.hip is None
        and torch.cuda.get_device_capability(index) in ((9, 0), (10, 0))
        and (torch.backends.cudnn.version() or 0) >= 91500
        and torch.backends.cuda.cudnn_sdp_enabled()
    )


@torch.compiler.assume_constant_result
def _has_flash(index: int | None) -> bool:
    """Return True if torch's flash kernel runs on this GPU: Ampere or later, or AMD's."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(index) >= (8, 0)


def _additive(keep: Tensor | None, like: Tensor) -> Tensor | None:
    if keep is None:
        return None
    bias = torch.zeros(keep.shape, dtype=like.dtype, device=like.device)
    return bias.masked_fill_(~keep, -math.inf).unsqueeze(1)


def _cpu_forward(q, k, v, keep, causal, scale):
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=_additive(keep, q), scale=scale
    )


def _cpu_backward(grad, q, k, v, out, lse, keep, causal, scale):
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=_additive(keep, q), scale=scale
    )


def _cudnn_forward(q, k, v, keep, causal, scale):
    out, lse = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )[:2]
    return out, lse.reshape(q.shape[:3])


def _cudnn_backward(grad, q, k, v, out, lse, keep, causal, scale):
    state = torch.zeros((), dtype=torch.int64, device=q.device)  # of a dropout that is not there
    return _aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse.unsqueeze(-1), state, state, None, None, None, q.shape[2],
        k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip


def _flash_forward(q, k, v, keep, causal, scale):
    return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _flash_backward(grad, q, k, v, out, lse, keep, causal, scale):
    # Without dropout the kernel never reads its random state, but it wants the tensors.
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.zeros((), dtype=torch.uint64, device=q.device)
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, state, unused,
        scale=scale,
    )  # fmt: skip


def _efficient_forward(q, k, v, keep, causal, scale):
    width, repeats = q.shape[-1], q.shape[1] // k.shape[1]
    k, v = (heads.repeat_interleave(repeats, dim=1) for heads in (k, v))
    q, k, v = map(_aligned, (q, k, v))
    out, lse, _, _ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, _padded_bias(keep, q), True, 0.0, causal, scale=scale
    )
    # The kernel pads the log-sum-exp to whole blocks of queries.
    return out[..., :width], lse[..., : q.shape[2]]


def _efficient_backward(grad, q, k, v, out, lse, keep, causal, scale):
    width, groups, repeats = q.shape[-1], k.shape[1], q.shape[1] // k.shape[1]
    k, v = (heads.repeat_interleave(repeats, dim=1) for heads in (k, v))
    grad, q, k, v, out = map(_aligned, (grad, q, k, v, out))
    out = out.transpose(1, 2).contiguous().transpose(1, 2)  # the kernel never asks for its strides
    state = torch.zeros((), dtype=torch.int64, device=q.device)
    blocks = -(-q.shape[2] // 32) * 32
    padded = F.pad(lse, (0, blocks - q.shape[2]), value=math.inf)
    grad_q, grad_k, grad_v, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, _padded_bias(keep, q), out, padded, state, state, 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    grad_k, grad_v = (heads.unflatten(1, (groups, repeats)).sum(2) for heads in (grad_k, grad_v))
    return grad_q[..., :width], grad_k[..., :width], grad_v[..., :width]


def _aligned(heads: Tensor) -> Tensor:
    """Return heads whose width the kernel can load: it knows none but multiples of 8.

    Columns of zeros change no logit, and those of the output and the gradients are cut off.
    """
    missing = -heads.shape[-1] % 8
    return F.pad(heads, (0, missing)) if missing else heads


def _padded_bias(keep: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the mask as a bias whose rows are aligned to 16 elements, as the kernel demands."""
    bias = _additive(keep, q)
    if bias is None:
        return None
    keys = bias.shape[-1]
    aligned = F.pad(bias, (0, -keys % 16))[..., :keys]
    return aligned.expand(q.shape[0], q.shape[1], -1, -1)
