"""The tile pass against the explicit weights: odd lengths, GQA, windows, capping, sinks."""

import dataclasses

import pytest
import torch

from wakeful.probes import exact
from wakeful.probes.base import AttentionEvent
from wakeful.probes.streaming import AttentionInputs, head_weights, tile_statistics

CASES = {
    "plain": {},
    "window": {"window": 7},
    "window-of-one": {"window": 1},
    "window-longer": {"window": 4000},
    "softcap": {"softcap": 1.5},
    "sink": {"sink": True},
    "all": {"window": 33, "softcap": 2.0, "sink": True},
}


def make(length, dtype, *, heads=6, groups=2, width=8, seed=0, sink=False, **options):
    torch.manual_seed(seed)
    q = torch.randn(heads, length, width, dtype=dtype) * 3
    k, v = torch.randn(2, groups, length, width, dtype=dtype)
    if sink:
        options["sink"] = torch.randn(heads, dtype=dtype)
    return AttentionInputs(q=q, k=k, v=v, scale=width**-0.5, **options)


def explicit(heads):
    return exact.attention_weights(
        heads.q, heads.k, scale=heads.scale, window=heads.window,
        softcap=heads.softcap, sink=heads.sink, keep=heads.keep,
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("length", [1, 2, 127, 301])
def test_statistics_are_the_definitions(case, dtype, tolerance, length):
    heads = make(length, dtype, **CASES[case])
    A = explicit(heads)
    statistics = tile_statistics(heads)
    close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    torch.testing.assert_close(statistics.column_sums, A.sum(1), **close)
    torch.testing.assert_close(statistics.column_energy, A.square().sum(1), **close)
    torch.testing.assert_close(statistics.column_energy.sum(-1), A.square().sum((1, 2)), **close)
    torch.testing.assert_close(statistics.importance, exact.token_importance(A), **close)
    torch.testing.assert_close(statistics.largest_row_sum, A.sum(2).amax(1), **close)
    torch.testing.assert_close(statistics.row_0_mass, A[:, 0, 0], **close)
    torch.testing.assert_close(
        statistics.first_key_rows / length, exact.first_key_share(A), **close
    )
    if length > 1:
        without = (statistics.first_key_rows - statistics.row_0_dominated) / (length - 1)
        torch.testing.assert_close(without, exact.first_key_share(A, with_row_0=False), **close)
    for head in (0, 5):
        torch.testing.assert_close(head_weights(heads, head), A[head], **close)


@pytest.mark.parametrize("length", [1, 2, 127, 301])
def test_uniform_attention_is_no_sink(length):
    heads = make(length, torch.float32)
    statistics = tile_statistics(dataclasses.replace(heads, q=torch.zeros_like(heads.q)))
    assert statistics.first_key_rows.tolist() == statistics.row_0_dominated.tolist()
    assert (statistics.row_0_dominated == 1).all()


def test_explicit_pairs_and_queries_that_see_nothing():
    keep = torch.rand(50, 50, generator=torch.Generator().manual_seed(3)) > 0.6
    keep[4] = False
    for sink in (False, True):
        heads = make(50, torch.float64, keep=keep, sink=sink)
        A, statistics = explicit(heads), tile_statistics(heads)
        assert not A.isnan().any()
        torch.testing.assert_close(statistics.column_sums, A.sum(1))
        torch.testing.assert_close(statistics.first_key_rows / 50, exact.first_key_share(A))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_are_computed_in_float32(dtype):
    half = make(65, dtype)
    whole = AttentionInputs(q=half.q.float(), k=half.k.float(), v=half.v.float(), scale=half.scale)
    torch.testing.assert_close(
        tile_statistics(half).column_sums, tile_statistics(whole).column_sums
    )


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("valid", ["left", "right", "holes"])
def test_padding_is_as_if_it_were_not_there(window, valid):
    torch.manual_seed(4)
    q = torch.randn(2, 4, 20, 8, dtype=torch.float64)
    k = torch.randn(2, 2, 20, 8, dtype=torch.float64)
    mask = torch.ones(2, 20, dtype=torch.bool)
    mask[1, {"left": slice(0, 6), "right": slice(13, 20), "holes": [3, 4, 9]}[valid]] = False
    event = AttentionEvent(0, q, k, k, 0.3, window=window, valid=mask)
    assert [s.length for s in event.sequences] == [20, int(mask[1].sum())]
    position = torch.arange(20)
    distance = position.unsqueeze(1) - position
    seen = (distance >= 0) & (distance < (window or 99)) & mask[1]
    A = exact.attention_weights(q[1], k[1], scale=0.3, keep=seen)[:, mask[1]][:, :, mask[1]]
    torch.testing.assert_close(event.statistics[1].column_sums, A.sum(1))
    torch.testing.assert_close(head_weights(event.sequences[1], 3), A[3])


def test_all_padding_is_refused():
    q = torch.randn(1, 1, 4, 2)
    event = AttentionEvent(0, q, q, q, 1.0, valid=torch.zeros(1, 4, dtype=torch.bool))
    with pytest.raises(ValueError, match="all padding"):
        _ = event.sequences
