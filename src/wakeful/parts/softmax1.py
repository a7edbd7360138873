# Copyright 2026 the wakeful authors. SPDX-License-Identifier: Apache-2.0
"""softmax-1 attention on torch's own fused kernels, with gradients, in one file.

A query's weights are p_i = e^{x_i} / (e^s + Σ_j e^{x_j}), so no token has to take what a head does
not need. s = 0 is softmax-1 (From Attention to Activation, eq. 1); s may be learned for each head.

    from softmax1 import softmax1_attention
    out = softmax1_attention(q, k, v)  # (B, H, L, d), in place of scaled_dot_product_attention

The fused kernels compute the ordinary softmax; their log-sum-exp is corrected afterwards:

    forward    lse' = log(e^lse + e^s)            out' = out · e^{lse − lse'}
    backward   the stock backward kernel, given (out', lse') for (out, lse); it recomputes the
               weights as e^{x − lse'} and uses D = Σ dO ∘ out', which is softmax-1's Jacobian
               ds = − e^{s − lse'} · Σ dO ∘ out', summed over the queries that share s

so a sink costs one more pass over the output and no L × S matrix; torch.compile sees it all.

Shapes: B batch, L queries, S keys, H query heads, G key/value heads (G divides H), d head width.
Cite: Kaul et al. 2025, From Attention to Activation; wakeful, by its CITATION.cff.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LAYOUTS = ("BHLd", "BLHd")
_aten = torch.ops.aten


def softmax1_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None = None,
    sink: Tensor | None = None,
    *,
    layout: str = "BHLd",
    causal: bool = True,
    keep: Tensor | None = None,
) -> Tensor:
    """Return attention with weights e^{x_i} / (e^s + Σ_j e^{x_j}), softmax-1 where s = 0.

    Args:
        q: queries (B, H, L, d) of the last L of the S tokens. Autocast applies to q, k and v.
        k: keys (B, G, S, d).
        v: values (B, G, S, d).
        scale: factor of the logits q · k; None for 1 / √d.
        sink: s, (H,) or (B, L, H) to differ by query, which may require gradients; None for 0.
        layout: order of the axes of q, k, v and the result: "BHLd", as in torch, or "BLHd".
        causal: whether no query sees a later key.
        keep: mask (1 or B, L, S) of the pairs that may attend, in place of `causal`; a query that
            sees nothing gets zeros.

    Raises:
        ValueError: the layout is unknown, or no fused kernel serves this dtype and device.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not one of {', '.join(LAYOUTS)}")
    if layout == "BHLd":
        q, k, v = (heads.transpose(1, 2) for heads in (q, k, v))
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (x.to(torch.get_autocast_dtype(x.device.type)) for x in (q, k, v))
    if not has_kernel(q):
        raise ValueError(
            f"softmax-1 has no fused kernel for {q.dtype} on {q.device.type}: use float32, "
            "bfloat16 or float16 there (float64 runs on the CPU)"
        )
    if sink is None:
        sink = q.new_zeros(q.shape[2])
    if scale is None:
        scale = math.pow(q.shape[-1], -0.5)
    causal = causal and keep is None and q.shape[1] > 1  # a single query, the last, sees all keys
    if causal and q.shape[1] != k.shape[1]:
        # Causal kernels take the first query for the first token's; here queries are the last.
        keep, causal = _causal_mask(q.shape[1], k.shape[1], q.device), False
    out = attend_with_sink(q, k, v, sink, keep, causal, scale)
    return out.transpose(1, 2) if layout == "BHLd" else out


def sink_softmax(logits: Tensor, sink: Tensor | None) -> Tensor:
    """Return e^{x_i} / (e^s + Σ_j e^{x_j}) of logits x (B, H, L, S) over the last axis.

    The sink s is (H,), or (B, L, H) to differ by query; None is −∞. A query whose logits are all −∞
    gets zero weights. The result has the dtype of the logits.

    Against overflow it is computed as e^{x_i − m} / (e^{s − m} + Σ_j e^{x_j − m}) with
    m = max(s, max x). It does not depend on m, so no gradient goes through m.
    """
    # This is m, but never −∞, for −∞ − (−∞) is NaN.
    largest = logits.detach().amax(-1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)
    sink_term = torch.zeros_like(largest)
    if sink is not None:
        column = _by_query(sink).unsqueeze(-1).to(logits.dtype)
        largest = torch.maximum(largest, column.detach())
        sink_term = torch.exp(column - largest)
    exponentials = torch.exp(logits - largest)
    total = sink_term + exponentials.sum(-1, keepdim=True)
    return exponentials / total.masked_fill(total == 0, 1.0)


def attend_with_sink(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor, keep: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Return attention (B, L, H, d) with e^s added to each query's denominator, s the `sink`: (H,),
    or (B, L, H) to differ by query.

    q, k and v are (B, L or S, heads, d). `keep` is True where a query sees a key, None without a
    mask; `causal` hides later keys without one. Inside a transform of `torch.func`, which cannot
    transform the kernels, the result is computed by the definition.
    """
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        return _by_definition(q, k, v, sink, keep, causal, scale)
    return SinkAttention.apply(q, k, v, sink, keep, causal, scale)[0]  # pyright: ignore


def has_kernel(q: Tensor) -> bool:
    """Return True if a fused kernel gives the log-sum-exp for this dtype and device."""
    return q.device.type == "cpu" or (q.device.type == "cuda" and q.dtype != torch.float64)


class SinkAttention(torch.autograd.Function):
    """The fused kernels with a sink: out (B, L, H, d) and lse' (B, H, L), which has no gradient."""

    @staticmethod
    def forward(q, k, v, sink, keep, causal, scale):
        """Return (output (B, L, H, d), lse' = log(e^lse + e^s) (B, H, L)).

        From lse' backward kernels compute the weights e^{x − lse'}. Where a query sees neither a
        key nor a sink, lse' is +∞, so that its weights are zero.
        """
        heads = [x.transpose(1, 2) for x in (q, k, v)]
        kernel, _ = _stock_kernels(q, keep)
        out, lse = kernel(*heads, keep=keep, causal=causal, scale=scale)
        sink = _by_query(sink).to(lse.dtype)
        if keep is not None:
            # Kernels disagree about a query that sees nothing; its output is zero by definition.
            sees_nothing = ~keep.any(-1).unsqueeze(1)
            lse = lse.masked_fill(sees_nothing, -math.inf)
            out = out.masked_fill(sees_nothing.unsqueeze(-1), 0.0)
        lse_with_sink = torch.logaddexp(lse, sink)
        remainder = torch.sigmoid(lse - sink)  # e^{lse − lse'}, without that difference's rounding
        if keep is not None:
            is_empty = lse_with_sink == -math.inf
            remainder = remainder.masked_fill(is_empty, 0.0)
            lse_with_sink = lse_with_sink.masked_fill(is_empty, math.inf)
        return (out * remainder.unsqueeze(-1).to(out.dtype)).transpose(1, 2), lse_with_sink

    @staticmethod
    def setup_context(ctx, inputs, output):
        """Save what backward needs; the second output, lse', has no gradient."""
        *tensors, ctx.causal, ctx.scale = inputs
        ctx.save_for_backward(*tensors, *output)
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, grad, _):  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients by q, k, v and the sink, given `grad`, that of the output
        (B, L, H, d). The other inputs have none.
        """
        q, k, v, sink, keep, out, lse = ctx.saved_tensors
        # With create_graph=True the gradient is itself to be differentiated. Kernels cannot be, so
        # the definition gives it then.
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            # Views, as one input may be computed from another: each gets its own gradient.
            inputs = [tensor.view_as(tensor) for tensor in (q, k, v, sink)]
            out = _by_definition(*inputs, keep=keep, causal=ctx.causal, scale=ctx.scale)
            needed = [tensor for tensor in inputs if tensor.requires_grad]
            grads = iter(torch.autograd.grad(out, needed, grad, create_graph=True))
            return *(next(grads) if x.requires_grad else None for x in inputs), None, None, None
        heads = [x.transpose(1, 2) for x in (grad, q, k, v, out)]
        options = {"lse": lse, "keep": keep, "causal": ctx.causal, "scale": ctx.scale}
        _, kernel = _stock_kernels(q, keep)
        grad_heads = kernel(*heads, **options)
        grad_sink = None
        if ctx.needs_input_grad[3]:  # ds = − e^{s − lse'} · Σ dO ∘ out', see above
            inner = torch.linalg.vecdot(grad.to(lse.dtype), out.to(lse.dtype)).transpose(1, 2)
            by_query = -torch.exp(_by_query(sink).to(lse.dtype) - lse) * inner
            grad_sink = by_query.transpose(1, 2) if sink.dim() == 3 else by_query.sum((0, 2))
            grad_sink = grad_sink.to(sink.dtype)
        return *(x.transpose(1, 2) for x in grad_heads), grad_sink, None, None, None


def _by_definition(
    q: Tensor, k: Tensor, v: Tensor, sink: Tensor, keep: Tensor | None, causal: bool, scale: float
) -> Tensor:
    """Return what `attend_with_sink` does, computed by the definition: with the whole L × S matrix
    of weights, in float32 or wider.
    """
    if keep is None and causal:
        keep = _causal_mask(q.shape[1], k.shape[1], q.device)
    wide = torch.promote_types(q.dtype, torch.float32)
    with torch.autocast(q.device.type, enabled=False):
        k, v = (heads.repeat_interleave(q.shape[2] // k.shape[2], dim=2) for heads in (k, v))
        logits = torch.einsum("blhd,bshd->bhls", q.to(wide), k.to(wide)) * scale
        if keep is not None:
            logits = logits.masked_fill(~keep.unsqueeze(1), -math.inf)
        return torch.einsum("bhls,bshd->blhd", sink_softmax(logits, sink), v.to(wide)).to(q.dtype)


def _causal_mask(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return a mask (1, L, S), True where a query sees a key; the queries are the last tokens'."""
    position = torch.arange(keys - queries, keys, device=device).unsqueeze(1)
    return (torch.arange(keys, device=device) <= position).unsqueeze(0)


def _by_query(sink: Tensor) -> Tensor:
    """Return sinks (H,) or (B, L, H) with the heads first: (1, H, 1) or (B, H, L)."""
    return sink.transpose(1, 2) if sink.dim() == 3 else sink.view(1, -1, 1)


def _stock_kernels(q: Tensor, keep: Tensor | None):
    """Return the fastest of torch's kernels for these queries (B, L, H, d) and mask, as (forward,
    backward). Backward takes the log-sum-exp that forward returns.

    cuDNN's and flash attention take 16-bit heads of some widths, without a mask; the
    memory-efficient kernel takes the rest.
    """
    if q.device.type == "cpu":
        return _cpu_forward, _cpu_backward
    width = q.shape[-1]
    is_simple = q.dtype in (torch.float16, torch.bfloat16) and keep is None and width % 8 == 0
    # cuDNN's kernel is for more than one query.
    if is_simple and width <= 128 and q.shape[1] > 1 and _prefers_cudnn(q.device.index):
        return _cudnn_forward, _cudnn_backward
    if is_simple and width <= 256 and _has_flash(q.device.index):
        return _flash_forward, _flash_backward
    return _efficient_forward, _efficient_backward


@torch.compiler.assume_constant_result
def _prefers_cudnn(index: int | None) -> bool:
    """Return True if torch's own attention prefers cuDNN's kernel on this GPU (Hopper, B200)."""
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
    """Return a boolean mask (B, L, S) as a bias (B, 1, L, S) to add to logits: 0 where it is True,
    −∞ elsewhere; None for no mask.
    """
    if keep is None:
        return None
    bias = torch.zeros(keep.shape, dtype=like.dtype, device=like.device)
    return bias.masked_fill_(~keep, -math.inf).unsqueeze(1)


def _cpu_forward(q, k, v, keep, causal, scale):
    """Return the output (B, H, L, d) and its log-sum-exp (B, H, L), by torch's CPU kernel."""
    return _aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=_additive(keep, q), scale=scale
    )


def _cpu_backward(grad, q, k, v, out, lse, keep, causal, scale):
    """Return the gradients of q, k and v (B, heads, L or S, d), by torch's CPU kernel."""
    return _aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, lse, 0.0, causal, attn_mask=_additive(keep, q), scale=scale
    )


def _cudnn_forward(q, k, v, keep, causal, scale):
    """Return the output (B, H, L, d) and its log-sum-exp (B, H, L), by cuDNN's kernel."""
    out, lse = _aten._scaled_dot_product_cudnn_attention(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )[:2]
    return out, lse.reshape(q.shape[:3])


def _cudnn_backward(grad, q, k, v, out, lse, keep, causal, scale):
    """Return the gradients of q, k and v (B, heads, L or S, d), by cuDNN's kernel."""
    unused_seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout
    return _aten._scaled_dot_product_cudnn_attention_backward(
        grad, q, k, v, out, lse.unsqueeze(-1), unused_seed, unused_seed, None, None, None,
        q.shape[2], k.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip


def _flash_forward(q, k, v, keep, causal, scale):
    return _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=scale)[:2]


def _flash_backward(grad, q, k, v, out, lse, keep, causal, scale):
    """Return the gradients of q, k and v (B, heads, L or S, d), by the flash kernel."""
    # Without dropout the kernel never reads its random state, but it wants the tensors.
    seed, offset = (torch.zeros(n, dtype=torch.uint64, device=q.device) for n in ((2,), ()))
    return _aten._scaled_dot_product_flash_attention_backward(
        grad, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, seed, offset,
        scale=scale,
    )  # fmt: skip


def _efficient_forward(q, k, v, keep, causal, scale):
    """Return the output of a plain softmax, and the log-sum-exp of each query's logits, by the
    memory-efficient kernel. It takes heads of any width here.

    `keep` is a mask of the pairs that may attend, or None; `scale` is a number, because the
    kernel's default would be that of the padded width.
    """
    width, repeats = q.shape[-1], q.shape[1] // k.shape[1]
    # The kernel wants as many key heads as query heads, and aligned widths.
    k, v = (heads.repeat_interleave(repeats, dim=1) for heads in (k, v))
    q, k, v = map(_aligned, (q, k, v))
    out, lse, _, _ = _aten._scaled_dot_product_efficient_attention(
        q, k, v, _padded_bias(keep, q), True, 0.0, causal, scale=scale
    )
    # The kernel pads the log-sum-exp to whole blocks of queries.
    return out[..., :width], lse[..., : q.shape[2]]


def _efficient_backward(grad, q, k, v, out, lse, keep, causal, scale):
    """Return the gradients of q, k and v (B, heads, L or S, d), by the memory-efficient kernel, for
    any width.
    """
    width, groups, repeats = q.shape[-1], k.shape[1], q.shape[1] // k.shape[1]
    k, v = (heads.repeat_interleave(repeats, dim=1) for heads in (k, v))
    grad, q, k, v, out = map(_aligned, (grad, q, k, v, out))
    # The kernel assumes (B, L, H, d) as the order in memory, and whole blocks of 32 queries.
    out = out.transpose(1, 2).contiguous().transpose(1, 2)
    # +∞ gives padding queries weights of zero.
    padded_lse = F.pad(lse, (0, -lse.shape[2] % 32), value=math.inf)
    unused_seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout
    grad_q, grad_k, grad_v, _ = _aten._scaled_dot_product_efficient_attention_backward(
        grad, q, k, v, _padded_bias(keep, q), out, padded_lse, unused_seed, unused_seed, 0.0,
        [True, True, True, False], causal, scale=scale,
    )  # fmt: skip
    # Each key head was repeated for several query heads: sum their gradients.
    grad_k, grad_v = (x.unflatten(1, (groups, repeats)).sum(2) for x in (grad_k, grad_v))
    return grad_q[..., :width], grad_k[..., :width], grad_v[..., :width]


def _aligned(heads: Tensor) -> Tensor:
    """Return heads (…, d) padded with zeros to a width that is a multiple of 8, as the kernel loads
    8 numbers at a time.
    """
    missing = -heads.shape[-1] % 8
    return F.pad(heads, (0, missing)) if missing else heads


def _padded_bias(keep: Tensor | None, q: Tensor) -> Tensor | None:
    """Return the mask as a bias with rows aligned to 16 elements, as the kernel requires."""
    bias = _additive(keep, q)
    if bias is None:
        return None
    # Padded in memory and cut in shape: the rows' stride is a multiple of 16.
    aligned = F.pad(bias, (0, -bias.shape[-1] % 16))[..., : bias.shape[-1]]
    return aligned.expand(q.shape[0], q.shape[1], -1, -1)
