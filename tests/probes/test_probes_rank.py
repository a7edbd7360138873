"""Ranks and their certificates: never outside the bounds, equal to the definition."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wakeful.errors import WakefulError
from wakeful.probes import certificates, exact
from wakeful.probes.base import AttentionEvent
from wakeful.probes.certificates import (
    RankBounds,
    column_bounds,
    exact_rank,
    mass_columns,
    matrix_rank,
    subspace_bounds,
    top_columns_bounds,
)
from wakeful.probes.rank import Ranks
from wakeful.probes.streaming import AttentionInputs, tile_statistics

KINDS = ("random", "low-rank", "sink", "uniform", "diagonal", "window", "mixed", "peaked")


def attention(kind, length, seed, dtype=torch.float64):
    """A causal weight matrix of a kind that models have."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=dtype, generator=generator)

    position = torch.arange(length)
    distance = position.unsqueeze(1) - position
    logits = {
        "random": lambda: normal(length, length),
        "low-rank": lambda: 2 * normal(length, 2) @ normal(2, length),
        "sink": lambda: normal(length, length) + 6.0 * (position == 0),
        "uniform": lambda: torch.zeros(length, length, dtype=dtype),
        "diagonal": lambda: normal(length, length) - 3.0 * distance.abs(),
        "window": lambda: normal(length, length).masked_fill(distance >= 9, -math.inf),
        "mixed": lambda: normal(length, length) - 0.05 * distance + 3.0 * (position == 0),
        "peaked": lambda: 8 * normal(length, length),
    }[kind]()
    return logits.masked_fill(distance < 0, -math.inf).softmax(-1)


kinds = st.sampled_from(KINDS)
lengths = st.integers(2, 90)
seeds = st.integers(0, 2**20)
taus = st.sampled_from([0.5, 0.9, 0.99])


@pytest.mark.slow
@settings(deadline=None, max_examples=120)
@given(kinds, lengths, seeds, taus)
def test_every_certificate_holds(kind, length, seed, tau):
    A = attention(kind, length, seed)
    true = exact.rank(A, tau).item()
    c1, c2 = A.sum(0, keepdim=True), A.square().sum(0, keepdim=True)
    (bounds,) = column_bounds(c1, c2, A.sum(1).amax().view(1), tau)
    assert bounds.low <= true <= bounds.high
    assert mass_columns(c2, tau).item() == exact.mass_columns(A, tau).item() >= true
    G = A.T @ A
    energy = c2.sum().item()
    generator = torch.Generator().manual_seed(seed)
    dimension = 1 + seed % length
    Q = torch.linalg.qr(torch.randn(length, dimension, dtype=torch.float64, generator=generator)).Q
    theta = torch.linalg.eigvalsh(Q.T @ G @ Q).flip(0).clamp_min(0)
    found = subspace_bounds(theta, energy, tau, 1e-13)
    assert found.low <= true <= found.high


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(kinds, lengths, seeds, taus)
def test_matrix_rank_is_the_definition(kind, length, seed, tau):
    A = attention(kind, length, seed)
    energy = torch.linalg.svdvals(A).square().cumsum(0) / A.square().sum()
    true = exact.rank(A, tau).item()
    assert matrix_rank(A, tau) == true
    assert matrix_rank(A, tau, causal=False) == true
    assert exact_rank(A, tau) == true
    # In float32 the matrix itself is rounded: a tie may fall either way, nothing else may.
    if (energy - tau).abs().min() > 1e-6:
        assert matrix_rank(A.float(), tau) == true


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [257, 400])
def test_larger_matrices_in_float32(kind, length):
    A = attention(kind, length, 5, torch.float32)
    assert matrix_rank(A, 0.9) == exact.rank(A.double(), 0.9).item()


def test_triangular_gram_is_the_gram():
    A = attention("mixed", 400, 2)
    columns = torch.arange(400)[torch.rand(400, generator=torch.Generator().manual_seed(0)) > 0.3]
    for kept in (torch.arange(400), columns):
        part = A[:, kept]
        torch.testing.assert_close(certificates.gram(part, kept).triu(), (part.T @ part).triu())
        torch.testing.assert_close(certificates.gram(part, None).triu(), (part.T @ part).triu())


def test_ties_are_decided_in_double_precision(monkeypatch):
    calls = []
    real = certificates.exact_rank
    monkeypatch.setattr(
        certificates, "exact_rank", lambda *a, **k: calls.append(1) or real(*a, **k)
    )
    A = torch.diag(torch.tensor([3.0, 1.0, 1.0]))  # 9 / 11 of the energy in the first
    assert matrix_rank(A, 10 / 11 - 1e-9) == 2
    assert matrix_rank(A, 10 / 11 + 1e-9) == 3
    assert calls


@settings(deadline=None, max_examples=40)
@given(st.integers(2, 70), seeds, taus, st.sampled_from([1, 4, 32]), st.booleans())
def test_streamed_bounds_hold(length, seed, tau, width, windowed):
    generator = torch.Generator().manual_seed(seed)
    q, k = torch.randn(2, 2, length, 4, dtype=torch.float64, generator=generator) * 2
    heads = AttentionInputs(q=q, k=k, v=k, scale=1.0, window=5 if windowed else None)
    A = exact.attention_weights(q, k, scale=1.0, window=heads.window)
    energy = tile_statistics(heads).column_energy
    for head in range(2):
        found = top_columns_bounds(heads, head, energy[head], tau, width=width)
        assert found.low <= exact.rank(A[head], tau).item() <= found.high


def event_of(batch, length, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, 4, length, 8, dtype=torch.float64, generator=generator) * 2
    k = torch.randn(batch, 2, length, 8, dtype=torch.float64, generator=generator)
    return AttentionEvent(3, q, k, k, 0.35, **options)


@pytest.mark.parametrize("sink", [None, torch.zeros(4, dtype=torch.float64)])
def test_rank_probe_means_and_maximum_over_heads(sink):
    event = event_of(3, 40, sink=sink)
    probe = Ranks(lazy_rank=1.5)
    probe.see(event)
    A = torch.stack(
        [exact.attention_weights(s.q, s.k, scale=s.scale, sink=sink) for s in event.sequences]
    )
    ranks = exact.rank(A, 0.9).double()
    rows = probe.rows().filter(metric="rank", variant="paper")
    heads = rows.filter(rows["head"].is_not_null()).sort("head")
    assert heads["value"].to_list() == pytest.approx(ranks.mean(0).tolist())
    assert heads["standard_error"].to_list() == pytest.approx((ranks.std(0) / 3**0.5).tolist())
    layer = rows.filter(rows["head"].is_null())
    assert layer["value"].item() == pytest.approx(ranks.mean(0).max().item())
    assert rows["kind"].unique().to_list() == ["exact"]
    columns = probe.rows().filter(metric="mass_columns")
    assert columns.filter(columns["head"].is_null())["value"].item() == pytest.approx(
        exact.mass_columns(A, 0.9).double().mean().item()
    )
    assert probe.rows().filter(metric="lazy")["value"].item() == 0
    near = (ranks.mean(0) <= 1.5).sum().item()
    assert probe.rows().filter(metric="near_rank_1")["value"].item() == near


def test_past_the_longest_length_ranks_are_bounds():
    event = event_of(2, 80)
    probe, unlimited = Ranks(max_tokens=32), Ranks()
    for each in (probe, unlimited):
        each.see(event)
    rows = probe.rows().filter(metric="rank")
    per_head = rows.filter(rows["head"].is_not_null())
    truth = unlimited.rows().filter(metric="rank", variant="paper")
    truth = truth.filter(truth["head"].is_not_null()).sort("head")["value"]
    upper = per_head.filter(variant="paper").sort("head")
    assert (upper["value"] >= truth).all()
    open_heads = upper.filter(kind="bound")["head"].to_list()
    lower = per_head.filter(variant="at_least").sort("head")
    assert lower["head"].to_list() == open_heads
    assert (lower["value"] <= truth.gather(open_heads)).all()
    kind = "bound" if open_heads else "exact"
    assert rows.filter(rows["head"].is_null())["kind"].to_list() == [kind]


def test_heads_without_any_weight_have_rank_1():
    nothing = torch.zeros(2, 7, dtype=torch.float64)
    (one, other) = column_bounds(nothing, nothing, nothing[:, 0], 0.9)
    assert one == other == RankBounds(1, 1)
    assert matrix_rank(torch.zeros(7, 7), 0.9) == exact.rank(torch.zeros(7, 7)).item() == 1


def test_bounds_meet():
    assert RankBounds(2, 9).meet(RankBounds(4, 20)) == RankBounds(4, 9)
    assert RankBounds(3, 3).closed


@pytest.mark.parametrize("tau", [0.0, 1.0, -1.0, 90.0])
def test_tau_is_a_fraction(tau):
    with pytest.raises(WakefulError, match="tau"):
        Ranks(tau=tau)
