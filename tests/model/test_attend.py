"""The kernels against the written-out definition: outputs, every gradient, masks and memory."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from model.attention import (
    CASES,
    SINKS,
    B,
    Case,
    by_queries,
    d,
    definition,
    heads,
    keep_of,
    plain_keep,
    sink_of,
)
from wakeful.errors import WakefulError
from wakeful.model.attend import attend, causal_mask, check_kernel, explicit_attention
from wakeful.parts.softmax1 import SinkAttention


def compare(case: Case, kind: str, *, scale: float = 0.3, size: float = 1.0, atol: float = 1e-10):
    q, k, v, drawn = heads(case, size=size)
    of_queries = kind == "of queries"
    sink = by_queries(drawn, case.L) if of_queries else sink_of(kind, drawn)
    out = attend(q, k, v, scale=scale, sink=sink, keep=keep_of(case))
    expected = definition(q, k, v, sink, plain_keep(case), scale)
    torch.testing.assert_close(out, expected, rtol=0, atol=atol)
    inputs = [q, k, v] + ([sink] if kind in ("learned", "of queries") else [])
    upstream = torch.randn_like(out)
    found = torch.autograd.grad(out, inputs, upstream)
    wanted = torch.autograd.grad(expected, inputs, upstream)
    for name, grad, want in zip("qkvs", found, wanted, strict=False):
        torch.testing.assert_close(
            grad, want, rtol=0, atol=atol, msg=lambda m, n=name: f"gradient of {n}: {m}"
        )


@pytest.mark.parametrize("kind", [*SINKS, "of queries"])
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_are_the_definition(name, kind):
    compare(CASES[name], kind)


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 20),
    past=st.integers(0, 7),
    grouping=st.sampled_from([(1, 1), (3, 1), (4, 2), (6, 3), (5, 5)]),
    kind=st.sampled_from([*SINKS, "of queries"]),
)
def test_any_shape_is_the_definition(length, past, grouping, kind):
    compare(Case(length, length + past, *grouping), kind)


@pytest.mark.parametrize("name", ["grouped", "padding", "a chunk after a prompt"])
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


def test_masks_by_hand():
    expected = {
        (3, 3): [[1, 0, 0], [1, 1, 0], [1, 1, 1]],
        (2, 4): [[1, 1, 1, 0], [1, 1, 1, 1]],
    }
    for (queries, keys), rows in expected.items():
        found = causal_mask(queries, keys, torch.device("cpu"))
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
        _, lse = SinkAttention.apply(q, k, v, sink, None, True, 0.3)
        assert lse.dtype == kept
        assert lse.shape == (B, 4, 5)
    x = 0.3 * torch.einsum("blhd,bshd->bhls", q, k).masked_fill(
        ~plain_keep(case)[:, None], -math.inf
    )
    column = sink.view(1, -1, 1, 1).expand(B, -1, 5, 1)
    expected = torch.logsumexp(torch.cat([x, column], -1), -1)
    torch.testing.assert_close(lse, expected, rtol=0, atol=1e-12)


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # by Dynamo
@pytest.mark.parametrize("name", ["grouped", "blind rows", "decoding"])
@pytest.mark.parametrize("trained", [True, False])
def test_compiling_sees_all_of_it(name, trained):
    """Tracing, fake kernels and the graph of the backward pass: no break, and the same values."""
    case = CASES[name]
    q, k, v, sink = heads(case)
    keep = keep_of(case)
    sink = sink if trained else sink.detach()
    inputs = (q, k, v, *([sink] if trained else []))

    def run(q, k, v, sink, keep):
        return attend(q, k, v, scale=0.3, sink=sink, keep=keep)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True, dynamic=True)
    out, found = run(q, k, v, sink, keep), compiled(q, k, v, sink, keep)
    upstream = torch.randn_like(out)
    wanted = torch.autograd.grad(out, inputs, upstream)
    for got, want in zip(torch.autograd.grad(found, inputs, upstream), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(found, out, rtol=0, atol=1e-12)


def test_the_log_sum_exp_carries_no_gradient():
    q, k, v, sink = heads(CASES["grouped"])
    assert not SinkAttention.apply(q, k, v, sink, None, True, 0.3)[1].requires_grad


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
        check_kernel(meta[0])
    # On another device's float64, whatever the mask.
    fake = type("Fake", (), {"device": torch.device("cuda"), "dtype": torch.float64})
    with pytest.raises(WakefulError, match=r"float64 on cuda.*float64 runs on the CPU"):
        check_kernel(fake)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("sink", [0.0, 30.0, -1e9, 1e5, -math.inf])
@pytest.mark.parametrize("logit", [1e4, -1e4, 3e38, -3e38, 88.0, -104.0])
def test_extreme_logits_keep_to_the_definition(
    logit: float, sink: float, masked: bool, dtype: torch.dtype
) -> None:
    """One key of every query's stands out by an extreme logit; one query sees nothing if masked.

    The gradient of q has keys as large as the logits as factors, so that its first channel, which
    is what is left where these cancel, says nothing.
    """
    if dtype == torch.float16 and abs(logit) > 65504:
        pytest.skip("no such number")
    generator = torch.Generator().manual_seed(3)
    q, k, v, grad = (
        torch.randn(1, 5, heads, 8, generator=generator).to(dtype) for heads in (2, 1, 1, 2)
    )
    q[..., 0], k[..., 0], k[:, 2, :, 0] = 1.0, 0.0, logit
    keep = causal_mask(5, 5, q.device).clone()
    keep[:, 1] &= not masked
    given = [q, k, v, torch.full((2,), sink)]

    def differentiated(exact: bool) -> list[Tensor]:
        wide = [t.double() if exact else t.clone() for t in given]
        *heads, s = (t.requires_grad_() for t in wide)
        if exact:
            out, _ = explicit_attention(*heads, scale=1.0, sink=s, keep=keep)
        else:
            out = attend(*heads, scale=1.0, sink=s, keep=keep if masked else None)
        out.backward(grad.to(out.dtype))
        return [out.detach(), *(t.grad for t in (*heads, s))]  # pyright: ignore

    found, expected = differentiated(False), differentiated(True)
    for each in (found, expected):
        each[1] = each[1][..., 1:]
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 5e-3}[dtype]
    for one, two in zip(found, expected, strict=True):
        scale = max(1.0, two.abs().max().item())
        torch.testing.assert_close(one.double(), two, rtol=0, atol=tolerance * scale)
