"""The order of training: every window once an epoch, on any number of ranks, from any step."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from wakeful.data.order import (
    IGNORED,
    Batches,
    Permutation,
    ValidationWindows,
    derive_key,
    mix64,
    number_documents,
)
from wakeful.data.tokens import TokenFile
from wakeful.errors import WakefulError


def token_file(num_tokens):
    """Tokens that say where they stand."""
    tokens = np.arange(num_tokens, dtype="<u4")
    return TokenFile(
        tokens=tokens,
        documents=np.zeros(1, np.int64),
        num_bytes=num_tokens,
        vocab_size=num_tokens,
        end_of_text=0,
        path=Path("train.tokens"),
    )


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(-(2**70), 2**70))
def test_a_permutation_is_a_bijection(size, seed):
    assert sorted(Permutation(size, seed)(np.arange(size))) == list(range(size))


@settings(deadline=None)
@given(st.integers(1, 2**62), st.integers(0, 99), st.data())
def test_of_any_size_it_stays_inside_and_apart(size, seed, data):
    places = data.draw(st.sets(st.integers(0, size - 1), max_size=20))
    images = Permutation(size, seed)(np.array(sorted(places), np.int64))
    assert len(set(images.tolist())) == len(places)
    assert all(0 <= image < size for image in images)


def test_a_permutation_is_element_by_element():
    permutation = Permutation(1000, 5)
    whole = permutation(np.arange(1000))
    assert (
        permutation(np.array([[17, 3], [999, 0]])).tolist() == whole[[[17, 3], [999, 0]]].tolist()
    )


@pytest.mark.slow
def test_a_permutation_looks_random():
    size, trials = 50, 4000
    places = np.stack([Permutation(size, seed)(np.arange(size)) for seed in range(trials)])
    counts = np.stack([np.bincount(column, minlength=size) for column in places.T])
    expected = trials / size
    chi_square = ((counts - expected) ** 2 / expected).sum(axis=1)  # 49 degrees of freedom
    assert abs(chi_square.mean() - (size - 1)) < 5 * (2 * (size - 1) / size) ** 0.5
    long = Permutation(100_000, 1)(np.arange(100_000))
    assert abs(np.corrcoef(np.arange(100_000), long)[0, 1]) < 0.02
    assert abs(np.corrcoef(long[:-1], long[1:])[0, 1]) < 0.02


def test_the_mixing_is_the_published_one():
    # SplitMix64 from seed 0: its first two outputs, as in the reference implementation.
    golden = 0x9E3779B97F4A7C15
    states = np.array([golden, 2 * golden % 2**64], np.uint64)
    assert [hex(value) for value in mix64(states, 0)] == [
        "0xe220a8397b1dcdaf",
        "0x6e789e6aa1b965f4",
    ]
    assert derive_key("epoch", 1, 23) != derive_key("epoch", 12, 3)


@pytest.mark.slow
@settings(deadline=None)
@given(
    num_tokens=st.integers(2, 120),
    length=st.integers(1, 40),
    batch_size=st.integers(1, 9),
    seed=st.integers(0, 99),
)
def test_every_window_comes_once_an_epoch(num_tokens, length, batch_size, seed):
    if num_tokens < length + 1:
        return
    batches = Batches(token_file(num_tokens), length=length, batch_size=batch_size, seed=seed)
    epochs = 3
    needed = -(-epochs * batches.num_windows // batch_size)
    rows = torch.cat([batches.batch(step) for step in range(needed)])
    assert rows.shape == (needed * batch_size, length + 1)
    assert rows.dtype == torch.int64
    # Rows are consecutive tokens on the circle.
    assert ((rows[:, 1:] - rows[:, :-1]) % num_tokens == 1 % num_tokens).all()
    for epoch in range(epochs):
        here = rows[epoch * batches.num_windows :][: batches.num_windows]
        targets = here[:, 1:].flatten().tolist()
        assert len(set(targets)) == len(targets) == num_tokens // length * length


def test_where_windows_begin_is_the_same_in_every_version():
    """A run that an earlier version began reads on where it was; three steps are one and a half
    epochs of ten windows each.
    """
    batches = Batches(token_file(103), length=10, batch_size=5, seed=3)
    assert [batches.starts(step).tolist() for step in range(3)] == [
        [23, 63, 73, 43, 13], [33, 53, 93, 83, 0], [42, 62, 82, 22, 12],
    ]  # fmt: skip


def test_epochs_differ_in_order_and_in_where_windows_begin():
    batches = Batches(token_file(1000), length=10, batch_size=100, seed=0)
    starts = [batches.starts(epoch) for epoch in range(6)]
    assert len({tuple(one % 10) for one in starts}) > 1
    assert len({tuple(np.argsort(one)) for one in starts}) == 6
    again = Batches(token_file(1000), length=10, batch_size=100, seed=0)
    assert (again.starts(4) == starts[4]).all()
    other = Batches(token_file(1000), length=10, batch_size=100, seed=1)
    assert (other.starts(0) != starts[0]).any()


def test_a_beginning_is_read_over_and_over():
    whole = token_file(1000)
    first = whole.truncate(205)
    batches = Batches(first, length=10, batch_size=20, seed=0)
    assert batches.num_windows == 20
    seen = np.concatenate([batches.batch(epoch).numpy().ravel() for epoch in range(5)])
    assert set(seen) <= {*whole.tokens[:204].tolist(), whole.end_of_text}
    # Its end is one of a document, so that what is read over again follows as another.
    assert first.read(np.array([200]), 8)[0].tolist() == [
        *whole.tokens[200:204].tolist(), whole.end_of_text, *whole.tokens[:3].tolist(),
    ]  # fmt: skip
    assert first.read(np.array([195]), 10)[0, -1] == whole.end_of_text
    assert np.array_equal(first.read(np.array([0]), 204)[0], whole.tokens[:204])
    assert (first.documents < 205).all()
    with pytest.raises(WakefulError, match="is more than the 1,000 training tokens"):
        whole.truncate(1001)


@pytest.mark.parametrize("world_size", [1, 2, 3, 6, 12])
def test_ranks_share_one_batch(world_size):
    file = token_file(500)
    whole = Batches(file, length=7, batch_size=12, seed=3)
    ranks = [
        Batches(file, length=7, batch_size=12, seed=3, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for step in (0, 1, 7, 123_456):
        parts = [rank.batch(step) for rank in ranks]
        assert all(len(part) == 12 // world_size for part in parts)
        assert torch.equal(torch.cat(parts), whole.batch(step))


def test_a_later_first_batch_goes_on_from_a_run_before():
    whole = Batches(token_file(300), length=10, batch_size=7, seed=4)
    later = Batches(token_file(300), length=10, batch_size=7, seed=4, first=3)
    assert all(torch.equal(later.batch(step), whole.batch(3 + step)) for step in range(9))
    assert np.array_equal(later.starts(0), whole.starts(3))


def test_a_far_step_costs_no_more_than_the_first():
    batches = Batches(token_file(5000), length=16, batch_size=4, seed=0)
    assert batches.batch(10**12).shape == (4, 17)


def test_rows_may_be_written_to():
    batches = Batches(token_file(50), length=4, batch_size=2, seed=0)
    batches.batch(0).zero_()
    assert batches.token_file.tokens[1] == 1


def test_what_batches_refuse():
    file = token_file(100)
    with pytest.raises(WakefulError, match="has 100 tokens, and one sequence of 100 needs 101"):
        Batches(file, length=100, batch_size=1, seed=0)
    with pytest.raises(WakefulError, match="multiple of the 3 processes"):
        Batches(file, length=10, batch_size=4, seed=0, world_size=3)


@pytest.mark.slow
@settings(deadline=None)
@given(st.integers(2, 300), st.integers(1, 40), st.integers(1, 9))
def test_every_validation_token_but_the_first_is_predicted_once(num_tokens, length, batch_size):
    windows = ValidationWindows(token_file(num_tokens), length=length, batch_size=batch_size)
    scored = []
    batches = list(windows)
    assert len(batches) == len(windows)
    for inputs, targets in batches:
        assert inputs.shape == targets.shape
        assert inputs.shape[1] == length
        assert 1 <= len(inputs) <= batch_size
        assert inputs.dtype == targets.dtype == torch.int64
        real = targets != IGNORED
        assert (targets[real] == inputs[real] + 1).all()
        assert (inputs[~real] == 0).all()
        scored += targets[real].tolist()
    assert scored == list(range(1, num_tokens))
    assert windows.num_predicted == len(scored)
    assert sum(len(inputs) for inputs, _ in batches) == windows.num_windows


def test_what_validation_refuses():
    with pytest.raises(WakefulError, match="has 1 tokens"):
        ValidationWindows(token_file(1), length=4, batch_size=1)


def test_an_end_of_text_begins_the_document_after_it() -> None:
    tokens = torch.tensor([[5, 9, 6, 7, 9, 9, 8], [9, 1, 2, 3, 4, 5, 6]])
    assert number_documents(tokens, 9).tolist() == [[0, 1, 1, 1, 2, 3, 3], [1] * 7]
