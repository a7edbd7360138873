"""What surrounds the GPU's kernels, with stand-ins for them that make the same demands.

The real ones run only on a GPU; signatures and shapes are also checked against torch's own, on the
meta device.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

from model.attention import CASES, SINKS, Case, definition, heads, keep_of, plain_keep, sink_of
from wakeful.model.attend import attend
from wakeful.parts import softmax1

BLOCK = 32
KERNELS = {
    "cudnn": (softmax1._cudnn_forward, softmax1._cudnn_backward),
    "flash": (softmax1._flash_forward, softmax1._flash_backward),
    "efficient": (softmax1._efficient_forward, softmax1._efficient_backward),
}


def logits(q, k, bias, causal, scale):
    x = scale * q @ k.transpose(-1, -2) + (0 if bias is None else bias)
    if causal:
        assert q.shape[2] == k.shape[2]
        x = x.masked_fill(torch.ones(x.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return x


def forward(q, k, v, bias, causal, scale):
    x = logits(q, k, bias, causal, scale)
    lse = x.logsumexp(-1)
    return (x - lse.unsqueeze(-1)).exp().nan_to_num(7.0) @ v, lse  # of a blind row: nonsense


def backward(grad, q, k, v, bias, out, lse, causal, scale):
    p = (logits(q, k, bias, causal, scale) - lse.unsqueeze(-1)).exp()
    inner = (grad * out).sum(-1, keepdim=True)
    ds = p * (grad @ v.transpose(-1, -2) - inner) * scale
    return ds @ k, ds.transpose(-1, -2) @ q, p.transpose(-1, -2) @ grad


def demand(*tensors):
    """Check what the memory-efficient kernels demand of heads (B, H, L, d)."""
    assert len({x.shape[1] for x in tensors}) == 1, "it knows no grouped heads"
    assert all(x.shape[-1] % 8 == 0 and x.stride(-1) == 1 for x in tensors)
    assert all(x.stride(dim) % 4 == 0 for x in tensors for dim in (1, 2))


def demand_bias(bias, q, k):
    if bias is not None:
        assert bias.shape == (*q.shape[:3], k.shape[2])
        assert bias.stride(-1) == 1
        assert all(bias.stride(dim) % 16 == 0 for dim in (0, 1, 2))


class StandIns:
    """Kernels by their definition, in place of `torch.ops.aten`."""

    def _scaled_dot_product_efficient_attention(
        self, q, k, v, bias, compute_log_sumexp, dropout, causal, *, scale
    ):
        assert compute_log_sumexp
        assert dropout == 0.0
        demand(q, k, v)
        demand_bias(bias, q, k)
        out, lse = forward(q, k, v, bias, causal, scale)
        return out, F.pad(lse, (0, -lse.shape[-1] % BLOCK), value=math.nan), None, None

    def _scaled_dot_product_efficient_attention_backward(
        self, grad, q, k, v, bias, out, lse, seed, offset, dropout, wanted, causal, *, scale
    ):
        assert dropout == 0.0
        assert wanted == [True, True, True, False]
        demand(grad, q, k, v, out)
        assert out.transpose(1, 2).is_contiguous(), "it does not ask for the output's strides"
        demand_bias(bias, q, k)
        assert lse.shape[-1] % BLOCK == 0
        assert (lse[..., q.shape[2] :] == math.inf).all()
        grads = backward(grad, q, k, v, bias, out, lse[..., : q.shape[2]], causal, scale)
        return *grads, None

    def _scaled_dot_product_cudnn_attention(
        self, q, k, v, bias, compute_log_sumexp, dropout, causal, debug, *, scale
    ):
        assert bias is None
        assert compute_log_sumexp
        out, lse, *rest = self._scaled_dot_product_flash_attention(
            q, k, v, dropout, causal, debug, scale=scale
        )
        return out, lse.unsqueeze(-1), *rest

    def _scaled_dot_product_cudnn_attention_backward(
        self, grad, q, k, v, out, lse, state, unused, bias, starts_q, starts_k, longest_q,
        longest_k, dropout, causal, *, scale,
    ):  # fmt: skip
        assert bias is None
        assert lse.shape == (*q.shape[:3], 1)
        return self._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, lse.squeeze(-1), starts_q, starts_k, longest_q, longest_k,
            dropout, causal, state, unused, scale=scale,
        )  # fmt: skip

    def _scaled_dot_product_flash_attention(self, q, k, v, dropout, causal, debug, *, scale):
        assert dropout == 0.0
        assert not debug
        repeats = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        return *forward(q, k, v, None, causal, scale), None, None

    def _scaled_dot_product_flash_attention_backward(
        self, grad, q, k, v, out, lse, starts_q, starts_k, longest_q, longest_k, dropout, causal,
        state, unused, *, scale,
    ):  # fmt: skip
        assert starts_q is None
        assert starts_k is None
        assert dropout == 0.0
        assert (longest_q, longest_k) == (q.shape[2], k.shape[2])
        groups, repeats = k.shape[1], q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(repeats, dim=1) for x in (k, v))
        grad_q, *grads = backward(grad, q, k, v, None, out, lse, causal, scale)
        return grad_q, *(x.unflatten(1, (groups, repeats)).sum(2) for x in grads)


def runs_on(kernel: str, case: Case) -> bool:
    """Tell whether a case comes to this kernel: the others take no mask, cuDNN no single token."""
    if kernel == "efficient":
        return True
    return case.mask == "causal" and (case.L == case.S > 1 or (kernel == "flash" and case.L == 1))


@pytest.mark.parametrize("kind", [kind for kind in SINKS if kind != "softmax"])
@pytest.mark.parametrize(
    ("kernel", "name", "width"),
    [(kernel, name, width)
     for kernel, width in (("cudnn", 8), ("flash", 8), ("efficient", 8), ("efficient", 6))
     for name, case in CASES.items() if runs_on(kernel, case)],
)  # fmt: skip
def test_outputs_and_gradients_are_the_definition(monkeypatch, kernel, name, width, kind):
    monkeypatch.setattr(softmax1, "_aten", StandIns())
    monkeypatch.setattr(softmax1, "_stock_kernels", lambda *_: KERNELS[kernel])
    case = CASES[name]
    q, k, v, drawn = heads(case)
    q, k, v = (x[..., :width].detach().requires_grad_() for x in (q, k, v))
    sink = sink_of(kind, drawn)
    out = attend(q, k, v, scale=0.3, sink=sink, keep=keep_of(case))
    expected = definition(q, k, v, sink, plain_keep(case), 0.3)
    inputs = (q, k, v, *([drawn] if kind == "learned" else []))
    upstream = torch.randn_like(expected)
    found = torch.autograd.grad(out, inputs, upstream)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for got, want in zip((out, *found), (expected, *wanted), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("length", [1, 7, 64, 100])
@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(
    ("kernel", "masked", "width"),
    [("cudnn", False, 64), ("flash", False, 64), ("efficient", False, 64), ("efficient", True, 64),
     ("efficient", True, 12)],
)  # fmt: skip
def test_calls_fit_torchs_own_signatures(kernel, masked, width, groups, length, dtype):
    q = torch.empty(2, 4, length, width, device="meta", dtype=dtype)
    k = torch.empty(2, groups, length, width, device="meta", dtype=dtype)
    v, grad = torch.empty_like(k), torch.empty_like(q)
    keep = torch.empty(1, length, length, device="meta", dtype=torch.bool) if masked else None
    ahead, back = KERNELS[kernel]
    out, lse = ahead(q, k, v, keep, not masked, 0.3)
    assert (out.shape, out.dtype) == (q.shape, dtype)
    assert (lse.shape, lse.dtype) == (q.shape[:3], torch.float32)
    grads = back(grad, q, k, v, out, lse, keep, not masked, 0.3)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in (q, k, v)]


@pytest.mark.parametrize(
    ("capability", "version", "length", "width", "kernel"),
    [((7, 5), 91900, 2, 64, "efficient"), ((8, 0), 91900, 2, 64, "flash"),
     ((9, 0), 91900, 2, 64, "cudnn"), ((9, 0), 91900, 1, 64, "flash"),
     ((9, 0), 91900, 2, 256, "flash"), ((9, 0), 90100, 2, 64, "flash")],
)  # fmt: skip
def test_a_gpu_takes_the_kernel_that_it_has(
    monkeypatch, capability, version, length, width, kernel
):
    with FakeTensorMode():
        q = torch.empty(1, length, 2, width, device="cuda:0", dtype=torch.float16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    assert softmax1._stock_kernels(q, None) == KERNELS[kernel]
