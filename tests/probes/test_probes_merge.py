"""Probes that each saw a part of the sequences, put together, against one that saw all."""

import functools
import itertools
import json
import math
from collections.abc import Callable

import numpy as np
import polars as pl
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

from helpers import some_tokens, tiny_decoder
from wakeful.probes.attention import (
    Entropy,
    Importance,
    Leading,
    Positions,
    Sinks,
    Spectrum,
    Values,
)
from wakeful.probes.base import Key, Means, MergeableProbe
from wakeful.probes.channels import ChannelOverlap, LargestWeights
from wakeful.probes.hidden import BlockInfluence, OutlierChannels, Outliers, Smoothing, Turned
from wakeful.probes.patterns import AttentionPictures, FirstAttention, HiddenPicture, MeanAttention
from wakeful.probes.rank import Ranks
from wakeful.probes.watch import watch
from wakeful.world import World

PROBES: dict[str, Callable[[], MergeableProbe]] = {
    "first token": Sinks,
    "entropy": Entropy,
    "importance": Importance,
    "leading": Leading,
    "positions": lambda: Positions(tokens=8),
    "turned": Turned,
    "rank": Ranks,
    "bounds": lambda: Ranks(seconds=0),  # some ranks are bounds
    "values": Values,
    "spectrum": Spectrum,
    "outliers": Outliers,
    "outlier channels": OutlierChannels,
    "channel overlap": ChannelOverlap,
    "smoothing": Smoothing,
    "weights": lambda: LargestWeights(tiny_decoder(dtype=torch.float32)),
    "blocks": BlockInfluence,
    "attention": lambda: AttentionPictures(layers=[0, 2], heads=[0, 3], size=8),
    "mean attention": lambda: MeanAttention(tokens=16),
    "hidden": lambda: HiddenPicture(tokens=20, bins=8),
}
KEY = Key(0, None, "all", "x", "paper")


def sequences() -> list[list[int]]:
    """Return five sequences, of two lengths; the third is the first again, so that peaks tie."""
    long, short = some_tokens(3, 24).tolist(), some_tokens(2, 13, seed=4).tolist()
    return [long[0], short[0], long[0], long[1], short[1]]


@functools.cache
def merged(size: int) -> dict[str, MergeableProbe]:
    """Return all probes, put together from what they saw on so many processes."""
    decoder = tiny_decoder(dtype=torch.float32).eval()
    everything = sequences()
    whole = {name: make() for name, make in PROBES.items()}
    for rank in range(size):
        part = {name: make() for name, make in PROBES.items()}
        with torch.inference_mode(), watch(decoder, *part.values()):
            for tokens in everything[World(rank=rank, size=size).part(len(everything))]:
                decoder(torch.tensor([list(tokens)]))
        if size == 1:
            return part
        for name, probe in whole.items():
            probe.merge(json.loads(json.dumps(part[name].state())))
    return whole


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.parametrize("size", [2, 3, 7])
def test_parts_make_the_whole(name: str, size: int) -> None:
    whole, found = merged(1)[name].rows(), merged(size)[name].rows()
    assert len(whole) > 0
    assert_frame_equal(found, whole, check_exact=False, rel_tol=1e-12, abs_tol=1e-14)
    exact = pl.col("metric").is_in(["rank", "lazy", "near_rank_1", "outlier_channel"])
    assert found.filter(exact)["value"].equals(whole.filter(exact)["value"])
    assert (whole["kind"] == "bound").any() == (name == "bounds")


def test_the_first_sequences_attention_is_kept() -> None:
    whole, found = FirstAttention(tokens=8), FirstAttention(tokens=8)
    decoder = tiny_decoder(dtype=torch.float32).eval()
    for probe, part in ((whole, sequences()), (found, sequences()[:1])):
        with torch.inference_mode(), watch(decoder, probe):
            for tokens in part:
                decoder(torch.tensor([tokens]))
    assert_frame_equal(found.frame(), whole.frame())
    assert whole.frame().group_by("layer", "head", "query").agg(pl.len()).height == (
        8 * decoder.config.num_layers * decoder.config.num_heads
    )
    later = FirstAttention(tokens=8)
    for probe in (whole, found):
        later.merge(json.loads(json.dumps(probe.state())))
    assert_frame_equal(later.frame(), whole.frame())


def test_every_sequence_has_one_process() -> None:
    for count in (1, 2, 3, 8, 13):
        everything = [[n] for n in range(count)]
        for size in (1, 2, 3, 5, 16):
            parts = [everything[World(rank=r, size=size).part(count)] for r in range(size)]
            assert [each for part in parts for each in part] == everything
            assert max(map(len, parts)) - min(map(len, parts)) <= 1


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=30),
    st.lists(st.integers(0, 30), max_size=4),
)
def test_means_and_errors_do_not_depend_on_the_cuts(values: list[float], cuts: list[int]) -> None:
    means = Means()
    edges = [0, *sorted(cuts), len(values)]
    for begin, end in itertools.pairwise(edges):
        part = Means()
        for value in values[begin:end]:
            part.add(KEY, value)
        means.merge(json.loads(json.dumps(part.state())))
    row = means.rows().row(0, named=True)
    size = float(np.abs(values).max())
    assert row["value"] == pytest.approx(np.mean(values), rel=1e-12, abs=1e-14 * size)
    if len(values) == 1:
        assert row["standard_error"] is None
    else:
        wanted = np.std(values, ddof=1) / math.sqrt(len(values))
        assert row["standard_error"] == pytest.approx(wanted, rel=1e-9, abs=1e-12 * size)


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
