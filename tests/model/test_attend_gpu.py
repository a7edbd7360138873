"""On a GPU: the fused kernels against the written-out definition."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend

from model.attention import CASES, SINKS, Case, d, definition, heads, keep_of, plain_keep, sink_of
from wakeful.errors import WakefulError
from wakeful.model.attend import attend
from wakeful.parts import softmax1

GPU_CASES = [
    "one token", "odd", "grouped", "one key head", "past one block of the kernel", "decoding",
    "a chunk after a prompt", "padding", "blind rows", "one mask for all",
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("name", GPU_CASES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        # TF32 stays off, so products are float32's; sums come in another order than on the CPU.
        (torch.float32, 2e-5),
        # As on the CPU: the inputs' own rounding, 0.1 % and 0.4 %.
        (torch.float16, 0.01),
        (torch.bfloat16, 0.06),
    ],
)
def test_on_a_gpu_outputs_and_gradients_are_the_definition(name, kind, dtype, tolerance):
    case = CASES[name]
    exact = heads(case)
    rough = [x.detach().to("cuda", dtype).requires_grad_() for x in exact]
    keep = keep_of(case)
    keep = None if keep is None else keep.cuda()
    sink = sink_of(kind, rough[3])
    out = attend(*rough[:3], scale=0.3, sink=sink, keep=keep)
    expected = definition(*exact[:3], sink_of(kind, exact[3]), plain_keep(case), 0.3)
    inputs = range(4 if kind == "learned" else 3)
    upstream = torch.randn_like(expected)
    found = torch.autograd.grad(out, [rough[i] for i in inputs], upstream.to("cuda", dtype))
    wanted = torch.autograd.grad(expected, [exact[i] for i in inputs], upstream)
    for got, want in zip((out, *found), (expected, *wanted), strict=True):
        assert got.dtype == dtype
        assert got.isfinite().all()
        error = (got.double().cpu() - want).abs().max()
        assert error < tolerance * max(1.0, want.abs().max().item())


@pytest.mark.gpu
@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_compiling_sees_all_of_it(dtype, masked):
    case = Case(7, 7, 4, 2, mask="padding" if masked else "causal")
    inputs = heads(case, dtype=dtype, device="cuda")
    keep = keep_of(case)
    keep = None if keep is None else keep.cuda()

    def run(q, k, v, sink):
        return attend(q, k, v, scale=0.3, sink=sink, keep=keep)

    compiled = torch.compile(run, fullgraph=True)
    expected, found = run(*inputs), compiled(*inputs)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for got, want in zip(torch.autograd.grad(found, inputs, upstream), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_on_a_gpu_the_fused_kernels_are_taken():
    q = torch.empty(1, 4, 2, 64, device="cuda", dtype=torch.bfloat16)
    wide = torch.empty(1, 4, 2, 320, device="cuda", dtype=torch.bfloat16)
    odd = torch.empty(1, 4, 2, 12, device="cuda", dtype=torch.bfloat16)
    keep = torch.ones(1, 4, 4, device="cuda", dtype=torch.bool)
    kernels = softmax1._stock_kernels
    prefers_cudnn = softmax1._prefers_cudnn(q.device.index)
    first = softmax1._cudnn_forward if prefers_cudnn else softmax1._flash_forward
    chosen = torch._fused_sdp_choice(*[q.transpose(1, 2)] * 3, None, 0.0, True)
    assert prefers_cudnn == (chosen == SDPBackend.CUDNN_ATTENTION.value)
    assert kernels(q, None)[0] is first
    assert kernels(q[:, :1], None)[0] is softmax1._flash_forward
    assert kernels(q, keep)[0] is softmax1._efficient_forward
    assert kernels(q.float(), None)[0] is softmax1._efficient_forward
    assert kernels(wide, None)[0] is softmax1._efficient_forward
    assert kernels(odd, None)[0] is softmax1._efficient_forward


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_on_a_gpu_float64_is_refused(masked):
    case = Case(5, 5, mask="padding" if masked else "causal")
    q, k, v, sink = heads(case, device="cuda")
    keep = keep_of(case)
    keep = None if keep is None else keep.cuda()
    with pytest.raises(WakefulError, match="float64 on cuda"):
        attend(q, k, v, scale=0.3, sink=sink, keep=keep)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_on_a_gpu_memory_grows_with_the_length_and_not_its_square(dtype):
    def peak(length: int) -> int:
        q, k, v, sink = heads(Case(length, length, 4, 2), dtype=dtype, device="cuda")
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(q, k, v, scale=0.3, sink=sink).sum().backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before

    peak(2048)
    assert peak(8192) < 5 * peak(2048)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["softmax1", "learned"])
def test_on_a_gpu_extreme_logits_are_stable(kind):
    case = Case(67, 67, 2, 1)
    for dtype in (torch.bfloat16, torch.float32):
        q, k, v, drawn = (x.detach() for x in heads(case, dtype=dtype, device="cuda"))
        q, k = q.sign().requires_grad_(), k.sign().requires_grad_()
        sink = sink_of(kind, drawn)
        out = attend(q, k, v, scale=1e4 / d, sink=sink)
        assert out.isfinite().all()
        assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), (q, k)))
        exact = [x.detach().double().cpu() for x in (q, k, v, sink)]
        expected = definition(*exact[:3], exact[3], plain_keep(case), 1e4 / d)
        # bfloat16's output rounds at 0.4 %, float32's logit of 1e4 at 1e-3.
        torch.testing.assert_close(out.double().cpu(), expected, rtol=0.02, atol=0.02)


@pytest.mark.gpu
def test_on_a_gpu_softmax_and_its_limit_agree():
    """A sink of −∞ in the limit is the ordinary softmax of the same kernel."""
    case = Case(67, 67, 4, 2)
    q, k, v, drawn = heads(case, dtype=torch.bfloat16, device="cuda")
    limit = attend(q, k, v, scale=0.3, sink=torch.full_like(drawn, -1e4))
    plain = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
        is_causal=True, scale=0.3, enable_gqa=True,
    ).transpose(1, 2)  # fmt: skip
    # Two roundings to bfloat16 of outputs of size 1.
    torch.testing.assert_close(limit.float(), plain.float(), rtol=0.01, atol=0.01)
