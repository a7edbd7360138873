"""Sinks after the first token, against their definition over whole attention matrices."""

import pytest
import torch

from surgery.test_prefix import TOKENS, Recorder, after, decoder, text
from wakeful.diagnosis.later_sinks import later_sinks
from wakeful.probes.attention import KeyShares
from wakeful.probes.exact import even_shares
from wakeful.probes.streaming import head_weights
from wakeful.probes.watch import watch
from wakeful.surgery import store_prefix

LENGTH = 150  # more than one tile


@torch.no_grad()
@pytest.mark.parametrize("stored", [0, 2])
def test_shares_of_keys_by_definition(stored: int) -> None:
    """A stored prefix is what the same tokens are before the text, and none of its keys."""
    plain = decoder(max_length=160)
    model = store_prefix(plain, TOKENS[:stored]) if stored else plain
    rows = text(3, LENGTH)
    keys, recorder = KeyShares(), Recorder()
    with watch(model, keys):
        for part in rows.split([2, 1]):
            model(part)
    with watch(plain, recorder):
        plain(after(rows) if stored else rows)
    shares, masses = torch.zeros(2, 3, LENGTH + stored).double()
    for event in recorder.events:
        for b, sequence in enumerate(event.sequences):
            for head in range(4):
                weights = head_weights(sequence, head)[stored + 1 :]
                shares[b] += weights.argmax(1).bincount(minlength=LENGTH + stored)
                masses[b] += weights.sum(0)
    count = 4 * 4 * (LENGTH - 1)
    shares, masses = shares[:, stored:] / count, masses[:, stored:] / count
    torch.testing.assert_close(torch.stack(keys.shares), shares)
    torch.testing.assert_close(torch.stack(keys.masses), masses, rtol=1e-6, atol=1e-9)


def test_even_attention_by_definition() -> None:
    expected = [sum(1 / (i + 1) for i in range(max(j, 1), 5)) / 4 for j in range(5)]
    torch.testing.assert_close(even_shares(5), torch.tensor(expected).double())
    assert float(even_shares(5).sum()) == pytest.approx(1.0)


def test_kinds_that_take_more_than_their_share_are_named() -> None:
    texts = {0: "<bos>", 1: "a", 2: ",", 3: ".", 4: "b"}
    rows = [[0, 1, 2, 1, 3, 1, 4, 1], [0, 4, 1, 2, 1, 1, 3, 1]]
    even = even_shares(8)

    def sinks(extra: list[dict[int, float]]) -> list[str]:
        shares = [even.clone(), even.clone()]
        for share, more in zip(shares, extra, strict=True):
            for key, value in more.items():
                share[key] += value
        return [each.name for each in later_sinks(rows, shares, shares, texts.__getitem__)]

    assert sinks([{}, {}]) == []
    # The first token is no later one, and a frequent token is no sink for being frequent.
    assert sinks([{0: 0.9}, {0: 0.9}]) == []
    assert sinks([{2: 0.4}, {3: 0.4}]) == ["',' (id 2)"]
    # Two tokens at one place, neither of which is a sink everywhere.
    assert later_sinks(rows, [even, even + 0.4 * torch.eye(8)[2]], [even] * 2, str) == ()
    assert sinks([{6: 0.04}, {6: 0.04}]) == []


def test_delimiters_are_a_kind_of_their_own() -> None:
    texts = {n: chr(ord("a") + n) for n in range(26)} | {26: ",", 27: " \n", 28: "."}
    rows = [[n % 26 for n in range(60)] for _ in range(3)]
    for row, places in zip(rows, ((5, 9, 33), (7, 20, 41), (8, 25, 50)), strict=True):
        for place, token in zip(places, (26, 27, 28), strict=True):
            row[place] = token
    tokens = torch.tensor(rows)
    shares = [*(even_shares(60) + 0.04 * (tokens >= 26))]
    (found,) = later_sinks(rows, shares, shares, texts.__getitem__)
    assert found.name == "delimiters together"
    assert found.excess == pytest.approx(0.12)


def test_one_place_whatever_stands_there() -> None:
    rows = [[0, *range(10 * n, 10 * n + 30)] for n in (1, 4, 7, 10)]
    even = even_shares(31)
    shares = [even + 0.19 * torch.eye(31)[7]] * 4
    (found,) = later_sinks(rows, shares, shares, str)
    assert found.name == "the token at position 7"
