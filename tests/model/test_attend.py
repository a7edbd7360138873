"""The kernels against the written-out definition: outputs, every gradient, masks and memory."""

import math
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from wakeful.errors import WakefulError
from wakeful.model import attend as attend_module
from wakeful.model.attend import (
    attend,
    causal_mask,
    explicit_attention,
    sink_attention,
    sink_attention_backward,
)


class Case(NamedTuple):
    """L queries at the end of S keys, H query heads on G key heads; what masks them."""

    L: int
    S: int
    H: int = 4
    G: int = 4
    prefix: int = 0
    mask: str = "causal"


CASES = {
    "one token": Case(1, 1),
    "odd": Case(7, 7),
    "grouped": Case(13, 13, 4, 2),
    "one key head": Case(9, 9, 4, 1),
    "past one block of the kernel": Case(67, 67, 2, 1),
    "decoding": Case(1, 11, 4, 2),
    "a chunk after a prompt": Case(5, 11, 4, 2),
    "prefix": Case(11, 11, 4, 2, prefix=4),
    "prefix as long as the text": Case(5, 5, prefix=5),
    "prefix longer than the text": Case(5, 5, prefix=9),
    "prefix of one": Case(5, 5, prefix=1),
    "a chunk after a prefix": Case(3, 11, 4, 2, prefix=4),
    "padding": Case(9, 9, 4, 2, mask="padding"),
    "padding and a chunk": Case(4, 9, 4, 1, mask="padding"),
    "blind rows": Case(9, 9, 4, 2, mask="blind"),
    "nobody sees anything": Case(3, 5, 2, 2, mask="nothing"),
    "any pairs": Case(8, 5, 2, 1, mask="random"),
    "one mask for all": Case(6, 6, 2, 2, mask="shared"),
}
SINKS = ["softmax", "softmax1", "learned"]
B, d = 2, 8


def heads(case: Case, *, dtype=torch.float64, size: float = 1.0, seed: int = 0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64) * size
        return values.to(device=device, dtype=dtype).requires_grad_()

    q, k, v = drawn(B, case.L, case.H, d), drawn(B, case.S, case.G, d), drawn(B, case.S, case.G, d)
    return q, k, v, drawn(case.H)


def sink_of(name: str, drawn: Tensor) -> Tensor | None:
    return {"softmax": None, "softmax1": torch.zeros_like(drawn), "learned": drawn}[name]


def keep_of(case: Case) -> Tensor | None:
    """Return the mask that the call is given, None where causality says it all."""
    L, S = case.L, case.S
    seen = torch.arange(S) <= torch.arange(S - L, S)[:, None]
    real = torch.arange(S) >= torch.tensor([[0], [3]])  # the second text has three tokens less
    generator = torch.Generator().manual_seed(9)
    match case.mask:
        case "padding":
            return seen & real[:, None]
        case "blind":
            return seen & (torch.arange(L) % 3 != 1)[:, None].expand(B, L, S)
        case "nothing":
            return torch.zeros(B, L, S, dtype=torch.bool)
        case "random":
            return torch.rand(B, L, S, generator=generator) < 0.4
        case "shared":
            return (torch.rand(1, L, S, generator=generator) < 0.5) & seen
    return None


def plain_keep(case: Case) -> Tensor:
    """Return who sees whom, pair by pair."""
    given = keep_of(case)
    if given is not None:
        return given.expand(B, -1, -1)
    seen = torch.zeros(case.L, case.S, dtype=torch.bool)
    for row in range(case.L):
        place = case.S - case.L + row
        for key in range(case.S):
            seen[row, key] = key <= place or (place < case.prefix and key < case.prefix)
    return seen.expand(B, -1, -1)


def definition(q, k, v, sink, keep, scale) -> Tensor:
    """Return Σ_j p_j v_j, p_j = e^{x_j} / (e^s + Σ e^x), head by head; zero for a blind query."""
    out = []
    for head in range(q.shape[2]):
        group = head * k.shape[2] // q.shape[2]
        x = scale * q[:, :, head] @ k[:, :, group].transpose(1, 2)
        top = x.detach().masked_fill(~keep, -math.inf).amax(-1, keepdim=True)
        top = top.clamp_min(-1e300) if sink is None else torch.maximum(top, sink[head].detach())
        e = torch.where(keep, torch.exp(torch.where(keep, x, 0) - torch.where(keep, top, 0)), 0)
        total = e.sum(-1, keepdim=True)
        if sink is not None:
            total = total + torch.exp(sink[head] - top)
        out.append(torch.where(total > 0, e / torch.where(total > 0, total, 1), 0) @ v[:, :, group])
    return torch.stack(out, dim=2)


def compare(case: Case, kind: str, *, scale: float = 0.3, size: float = 1.0, atol: float = 1e-10):
    q, k, v, drawn = heads(case, size=size)
    sink = sink_of(kind, drawn)
    out = attend(q, k, v, scale=scale, sink=sink, prefix=case.prefix, keep=keep_of(case))
    expected = definition(q, k, v, sink, plain_keep(case), scale)
    torch.testing.assert_close(out, expected, rtol=0, atol=atol)
    inputs = [q, k, v] + ([drawn] if kind == "learned" else [])
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, upstream)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for name, grad, want in zip("qkvs", found, wanted, strict=False):
        torch.testing.assert_close(
            grad, want, rtol=0, atol=atol, msg=lambda m, n=name: f"gradient of {n}: {m}"
        )


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_the_definition(name, kind):
    compare(CASES[name], kind)


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 20),
    past=st.integers(0, 7),
    grouping=st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 3), (5, 5)]),
    prefix=st.integers(0, 6),
    kind=st.sampled_from(SINKS),
)
def test_any_shape_is_the_definition(length, past, grouping, prefix, kind):
    compare(Case(length, length + past, *grouping, prefix=prefix), kind)


@pytest.mark.parametrize("name", ["grouped", "padding", "prefix", "a chunk after a prompt"])
@pytest.mark.parametrize("kind", SINKS)
def test_the_library_s_own_definition_agrees(name, kind):
    case = CASES[name]
    q, k, v, drawn = heads(case)
    sink = sink_of(kind, drawn)
    keep = plain_keep(case)
    out, weights = explicit_attention(q, k, v, scale=0.3, sink=sink, keep=keep)
    torch.testing.assert_close(out, definition(q, k, v, sink, keep, 0.3), rtol=0, atol=1e-12)
    total = weights.sum(-1)
    blind = ~keep.any(-1)[:, None].expand_as(total)
    assert (total[blind] == 0).all()
    if sink is None:
        torch.testing.assert_close(total[~blind], torch.ones_like(total[~blind]))
    else:
        assert (total < 1).all()


def test_copies_are_stretches_that_each_begin_anew():
    case = Case(5, 7, 4, 2)
    q, k, v, sink = heads(case)
    _, k2, v2, _ = heads(case, seed=1)
    keep = plain_keep(case)
    both = torch.cat([k, k2], 1), torch.cat([v, v2], 1)
    out = attend(q, *both, scale=0.3, sink=sink, copies=2)
    expected = definition(q, *both, sink, keep.repeat(1, 1, 2), 0.3)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_masks_by_hand():
    expected = {
        (3, 3, 0): [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
        (2, 4, 0): [[1, 1, 1, 0], [1, 1, 1, 1]],
        (4, 4, 3): [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
        (3, 4, 3): [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]],
    }
    for (queries, keys, prefix), rows in expected.items():
        found = causal_mask(queries, keys, prefix, torch.device("cpu"))
        assert found.int().tolist() == [rows]


@pytest.mark.parametrize("kind", SINKS)
@pytest.mark.parametrize("size", [1e2, 1e4])
def test_extreme_logits_are_stable(kind, size):
    """Logits of ±size break a literal e^x, and a 1 added after subtracting the maximum."""
    case = Case(6, 6, 2, 1)
    q, k, v, drawn = heads(case)
    with torch.no_grad():
        q.copy_(q.sign())
        k.copy_(k.sign())
    scale = size / d
    keep = plain_keep(case)
    sink = sink_of(kind, drawn)
    expected = definition(q, k, v, sink, keep, scale)
    upstream = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (q, k, v), upstream)
    for dtype, atol in ((torch.float64, 1e-9), (torch.float32, 1e-3)):
        # float32 carries a logit of 1e4 with an error of 1e-3, and so the weights it makes.
        rough = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        rough_sink = None if sink is None else sink.detach().to(dtype)
        out = attend(*rough, scale=scale, sink=rough_sink)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=atol)
        for grad, want in zip(
            torch.autograd.grad(out, rough, upstream.to(dtype)), wanted, strict=True
        ):
            # The gradients of q and k carry the scale as a factor.
            torch.testing.assert_close(grad.double(), want, rtol=atol, atol=atol * scale)


@pytest.mark.parametrize("sink", [-1e4, -50.0, 50.0, 1e4])
def test_extreme_sinks_are_stable(sink):
    case = Case(6, 6, 2, 1)
    q, k, v, drawn = heads(case)
    constant = torch.full_like(drawn, sink).requires_grad_()
    out = attend(q, k, v, scale=0.3, sink=constant)
    torch.testing.assert_close(out, definition(q, k, v, constant, plain_keep(case), 0.3))
    grads = torch.autograd.grad(out.sum(), (q, k, v, constant))
    assert all(grad.isfinite().all() for grad in grads)
    if sink == -1e4:
        plain = attend(q, k, v, scale=0.3)
        torch.testing.assert_close(out, plain, rtol=0, atol=1e-14)
    if sink == 1e4:
        assert (out == 0).all()


@pytest.mark.parametrize("name", ["odd", "grouped", "past one block of the kernel", "padding"])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [
        # Of outputs and gradients of size 1: float32 rounds at 1e-7 and sums some 70 terms.
        (torch.float32, 1e-5),
        # bfloat16 rounds at 0.4 %, inputs and upstream gradient alike, before any kernel starts,
        # and the gradients of k sum several queries.
        (torch.bfloat16, 0.06),
    ],
)
def test_lower_precisions_stay_near_float64(name, dtype, tolerance):
    case = CASES[name]
    exact = heads(case)
    rough = [x.detach().to(dtype).requires_grad_() for x in exact]
    out = attend(*rough[:3], scale=0.3, sink=rough[3], keep=keep_of(case))
    expected = definition(*exact[:3], exact[3], plain_keep(case), 0.3)
    assert out.dtype == dtype
    upstream = torch.randn_like(expected)
    found = torch.autograd.grad(out, rough, upstream.to(dtype))
    wanted = torch.autograd.grad(expected, exact, upstream)
    for got, want in zip((out, *found), (expected, *wanted), strict=True):
        assert got.dtype == dtype
        assert (got.double() - want).abs().max() < tolerance * max(1.0, want.abs().max().item())


def test_the_log_sum_exp_is_kept_in_float32():
    case = Case(5, 5)
    for dtype, kept in (
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
    ):
        q, k, v, sink = heads(case, dtype=dtype)
        _, lse = sink_attention(q, k, v, sink, None, True, 0.3)
        assert lse.dtype == kept
        assert lse.shape == (B, 4, 5)
    x = 0.3 * torch.einsum("blhd,bshd->bhls", q, k).masked_fill(
        ~plain_keep(case)[:, None], -math.inf
    )
    column = sink.view(1, -1, 1, 1).expand(B, -1, 5, 1)
    expected = torch.logsumexp(torch.cat([x, column], -1), -1)
    torch.testing.assert_close(lse, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["grouped", "blind rows", "decoding"])
@pytest.mark.parametrize("trained", [True, False])
def test_the_operator_keeps_its_promises(name, trained):
    """Schema, fake kernels, autograd registration and tracing, by PyTorch's own checker."""
    case = CASES[name]
    q, k, v, sink = heads(case)
    keep = keep_of(case)
    causal = keep is None and case.L == case.S
    if not trained:
        sink = sink.detach()
    torch.library.opcheck(sink_attention, (q, k, v, sink, keep, causal, 0.3))
    with torch.no_grad():
        out, lse = sink_attention(q, k, v, sink, keep, causal, 0.3)
        inputs = tuple(x.detach() for x in (torch.randn_like(out), q, k, v, out, lse))
    torch.library.opcheck(
        sink_attention_backward,
        (*inputs, keep, causal, 0.3),
        test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_gradcheck():
    case = Case(3, 5, 2, 1)
    q, k, v, sink = heads(case)
    assert torch.autograd.gradcheck(
        lambda *x: attend(*x[:3], scale=0.3, sink=x[3]), (q, k, v, sink), atol=1e-6
    )


def test_only_what_needs_a_gradient_gets_one():
    case = Case(5, 5)
    for needed in range(4):
        inputs = [x.detach().requires_grad_(i == needed) for i, x in enumerate(heads(case))]
        out = attend(*inputs[:3], scale=0.3, sink=inputs[3])
        (found,) = torch.autograd.grad(out.sum(), inputs[needed])
        whole = heads(case)
        expected = definition(*whole, plain_keep(case), 0.3)
        (wanted,) = torch.autograd.grad(expected.sum(), whole[needed])
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12)
    with torch.no_grad():
        assert not attend(*heads(case)[:3], scale=0.3, sink=heads(case)[3]).requires_grad


@pytest.mark.parametrize("kind", SINKS)
def test_inputs_of_any_layout_are_read_right(kind):
    """A cache hands out transposed views, a fused projection slices of one tensor."""
    case = Case(5, 5, 4, 4)
    packed = torch.randn(B, 5, 3, 4, d, dtype=torch.float64)
    q, k, v = packed.unbind(2)
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))
    sink = sink_of(kind, torch.randn(4, dtype=torch.float64))
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = attend(q, k, v, scale=0.3, sink=sink)
    expected = definition(q, k, v, sink, plain_keep(case), 0.3)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    # A gradient that is expanded or transposed, as sums and einsums leave them.
    for upstream in (torch.ones((), dtype=torch.float64).expand_as(out), out.detach().mT.mT):
        found = torch.autograd.grad(out, (q, k, v), upstream, retain_graph=True)
        wanted = torch.autograd.grad(expected, (q, k, v), upstream, retain_graph=True)
        for got, want in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", SINKS)
def test_no_square_matrix_is_ever_made(kind):
    """Neither kept for the backward pass nor allocated on the way; at this length it would show."""
    case = Case(512, 512, 2, 1)
    q, k, v, drawn = heads(case, dtype=torch.float32)
    sink = sink_of(kind, drawn)
    kept: list[int] = []
    with saved_tensors_hooks(lambda x: (kept.append(x.numel()), x)[1], lambda x: x):
        out = attend(q, k, v, scale=0.3, sink=sink)
    assert max(kept) <= q.numel()

    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        attend(q, k, v, scale=0.3, sink=sink).sum().backward()
    largest = max(event.self_cpu_memory_usage for event in seen.events())
    # The kernel's own scratch is a few blocks; one square is 512² floats a head.
    assert largest < 512 * 512 * 4
    assert out.shape == (B, 512, 2, d)


def test_recomputing_activations_changes_nothing():
    case = Case(9, 9, 4, 2)
    inputs = heads(case)
    plain = attend(*inputs[:3], scale=0.3, sink=inputs[3])
    again = checkpoint(
        lambda q, k, v, s: attend(q, k, v, scale=0.3, sink=s), *inputs, use_reentrant=False
    )
    assert torch.equal(plain, again)
    upstream = torch.randn_like(plain)
    for got, want in zip(
        torch.autograd.grad(again, inputs, upstream),
        torch.autograd.grad(plain, inputs, upstream),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_autocast_brings_heads_to_one_dtype():
    case = Case(5, 5, 4, 2)
    q, k, v, sink = heads(case, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = attend(q, k.to(torch.bfloat16), v, scale=0.3, sink=sink)
    assert out.dtype == torch.bfloat16
    grads = torch.autograd.grad(out.sum(), (q, k, v, sink))
    assert [grad.dtype for grad in grads] == [torch.float32] * 4


@pytest.mark.usefixtures("as_users_run_it")
def test_what_no_kernel_can_do_is_refused():
    case = Case(5, 5)
    q, k, v, sink = heads(case)
    meta = [x.detach().to("meta") for x in (q, k, v, sink)]
    with pytest.raises(WakefulError, match=r"no fused kernel for torch\.float64 on meta"):
        attend_module._stock_kernels(*meta[:2], None)
    # On another device's float64, whatever the mask.
    fake = type(
        "Fake", (), {"device": torch.device("cuda"), "dtype": torch.float64, "shape": (1, d)}
    )
    with pytest.raises(WakefulError, match=r"float64 on cuda.*float64 runs on the CPU"):
        attend_module._stock_kernels(fake, fake, None)


# ------------------------------------------------------------------------- on a GPU

GPU_CASES = [
    "one token", "odd", "grouped", "one key head", "past one block of the kernel", "decoding",
    "a chunk after a prompt", "prefix", "padding", "blind rows", "one mask for all",
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
    out = attend(*rough[:3], scale=0.3, sink=sink, prefix=case.prefix, keep=keep)
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
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_on_a_gpu_the_operator_keeps_its_promises(dtype, masked):
    case = Case(7, 7, 4, 2, mask="padding" if masked else "causal")
    q, k, v, sink = heads(case, dtype=dtype, device="cuda")
    keep = keep_of(case)
    keep = None if keep is None else keep.cuda()
    torch.library.opcheck(
        sink_attention,
        (q, k, v, sink, keep, not masked, 0.3),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.gpu
def test_on_a_gpu_the_fused_kernels_are_taken():
    q = torch.empty(1, 4, 2, 64, device="cuda", dtype=torch.bfloat16)
    wide = torch.empty(1, 4, 2, 320, device="cuda", dtype=torch.bfloat16)
    odd = torch.empty(1, 4, 2, 12, device="cuda", dtype=torch.bfloat16)
    keep = torch.ones(1, 4, 4, device="cuda", dtype=torch.bool)
    kernels = attend_module._stock_kernels
    assert kernels(q, q, None)[0] is attend_module._flash_forward
    assert kernels(q, q, keep)[0] is attend_module._efficient_forward
    assert kernels(q.float(), q.float(), None)[0] is attend_module._efficient_forward
    assert kernels(wide, wide, None)[0] is attend_module._efficient_forward
    assert kernels(odd, odd, None)[0] is attend_module._efficient_forward


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
