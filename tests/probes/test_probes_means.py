"""Means over sequences with their standard errors, and what is kept of the first sequence alone."""

import math

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from helpers import some_tokens, tiny_decoder
from wakeful.probes.attention import FirstAttention
from wakeful.probes.base import Means, RowKey
from wakeful.probes.watch import watch

KEY = RowKey(0, None, "all", "x", "paper")


def test_the_first_sequences_attention_is_kept() -> None:
    whole, alone = FirstAttention(tokens=8), FirstAttention(tokens=8)
    decoder = tiny_decoder(dtype=torch.float32).eval()
    sequences = [*some_tokens(3, 24).tolist(), *some_tokens(2, 13, seed=4).tolist()]
    for probe, part in ((whole, sequences), (alone, sequences[:1])):
        with torch.inference_mode(), watch(decoder, probe):
            for tokens in part:
                decoder(torch.tensor([tokens]))
    assert_frame_equal(alone.frame(), whole.frame())
    assert whole.frame().group_by("layer", "head", "query").agg(pl.len()).height == (
        8 * decoder.config.num_layers * decoder.config.num_heads
    )


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30))
def test_means_and_errors_are_those_of_all_values(values: list[float]) -> None:
    means = Means()
    for value in values:
        means.add(KEY, value)
    row = means.rows().row(0, named=True)
    size = float(np.abs(values).max())
    assert row["value"] == pytest.approx(np.mean(values), rel=1e-12, abs=1e-14 * size)
    if len(values) == 1:
        assert row["standard_error"] is None
    else:
        expected = np.std(values, ddof=1) / math.sqrt(len(values))
        assert row["standard_error"] == pytest.approx(expected, rel=1e-9, abs=1e-12 * size)


@settings(deadline=None)
@given(st.lists(st.integers(1, 4096), min_size=1, max_size=30), st.randoms())
def test_means_of_ranks_are_the_same_in_any_order(ranks: list[int], random: object) -> None:
    shuffled = sorted(ranks, key=lambda _: random.random())  # pyright: ignore
    found = []
    for order in (ranks, shuffled):
        means = Means()
        for rank in order:
            means.add(KEY, rank)
        found.append(means.rows()["value"].item())
    assert found[0] == found[1] == sum(ranks) / len(ranks)
