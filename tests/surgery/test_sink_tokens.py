"""The token that takes a text's sink is measured: the loss first, then the sink that remains."""

import math
from collections.abc import Sequence

import pytest
import torch
from torch.nn.functional import cross_entropy

from surgery.test_prefix import decoder, text
from wakeful.estimates import NEGLIGIBLE, LossChange, student_quantile
from wakeful.surgery import SinkTrial, choose_sink_tokens, losses_after_opening, sink_tokens
from wakeful.surgery.sink_tokens import choose_sink_cure, measure_trial, race_tokens

BASE = (2.0, 2.2, 1.8, 2.1)


def test_a_loss_change_is_paired() -> None:
    change = LossChange.between([1.0, 2.0, 3.0], [1.1, 2.2, 3.3])
    error = 0.1 / math.sqrt(3)
    assert change.change == pytest.approx(0.2)
    assert change.error == pytest.approx(error)
    assert change.interval == pytest.approx(
        (0.2 - student_quantile(2) * error, 0.2 + student_quantile(2) * error)
    )
    assert str(change) == "+0.200 nats per token (95% interval −0.048 to +0.448)"
    assert not change.is_worse
    assert LossChange.between([1.0, 2.0, 3.0], [1.19, 2.2, 3.21]).is_worse
    # What rounding makes is no loss, however alike the windows find it.
    assert not LossChange.between([1.0, 2.0], [1 + NEGLIGIBLE / 2, 2 + NEGLIGIBLE / 2]).is_worse
    assert not LossChange.between([1.0], [9.0]).is_worse
    # Nor is a rise that too few windows leave open taken for none.
    wide = LossChange.between([1.0, 2.0], [1.0, 3.8])
    assert (wide.is_worse, wide.is_harmless) == (False, False)
    assert LossChange.between([1.0, 2.0], [1.01, 1.99]).is_harmless
    assert "single window" in str(LossChange.between([1.0], [9.0]))


def test_losses_of_windows_by_definition() -> None:
    model = decoder()
    whole = torch.cat([torch.tensor([[7, 9]] * 3), text(3)], 1)
    expected = cross_entropy(
        model(whole)[:, 2:-1].transpose(1, 2), text(3)[:, 1:], reduction="none"
    ).mean(1)
    found = losses_after_opening(model, text(3), [7, 9])
    torch.testing.assert_close(torch.tensor(found).double(), expected, rtol=1e-6, atol=1e-6)


@torch.no_grad()
def test_the_sink_that_remains_by_definition() -> None:
    model = decoder()
    with sink_tokens.watch(model, seen := sink_tokens.Sinks()):
        model(text())
    rows = seen.rows()
    rows = rows.filter(rows["head"].is_null())
    mean = rows.filter(metric="first_key_share_without_row_0")["value"].mean()
    assert measure_trial(model, text(), ()).share == pytest.approx(mean)


SHIFTS = {
    # What each token adds to the loss of four windows, the share it leaves, and what is chosen.
    "BOS, where it is as good": ({5: (0.00, 0.01, -0.01, 0.0), 7: (-0.01,) * 4}, {5: 0.07}, (5,)),
    "not BOS, where it costs": ({5: (0.30, 0.31, 0.3, 0.29), 7: (0.01, -0.01, 0.0, 0.0)}, {}, (7,)),
    "not BOS, where it leaves the sink": ({5: (0.0,) * 4, 7: (0.0,) * 4}, {5: 0.9}, (7,)),
    "not BOS, where it may cost": ({5: (0.0, 3.0, 0.1, 0.0), 7: (0.01, -0.01, 0, 0)}, {}, (7,)),
    "nothing, where all cost": ({5: (0.3,) * 4, 7: (0.2,) * 4}, {}, ()),
    "what is best in loss": ({5: (0.3,) * 4, 7: (-0.1,) * 4, 8: (-0.2,) * 4}, {}, (8,)),
    "the least sink, where all leave one": ({5: (0.0,) * 4, 7: (0.0,) * 4},
                                           {5: 0.9, 7: 0.8}, (7,)),
}  # fmt: skip


@pytest.mark.parametrize("case", SHIFTS)
def test_the_loss_decides_first(case: str) -> None:
    shifts, shares, best = SHIFTS[case]

    def trial(token: int, added: Sequence[float]) -> SinkTrial:
        losses = [base + more for base, more in zip(BASE, added, strict=True)]
        return SinkTrial((token,), tuple(losses), shares.get(token, 0.06), 0.0)

    trials = {token: trial(token, added) for token, added in shifts.items()}
    found = choose_sink_cure(SinkTrial((), BASE), trials, preferred=5, free=0.07)
    assert found.best.tokens == best
    if best == ():
        assert found.token.tokens == (7,)
        assert found.change(found.token).change == pytest.approx(0.2)


@pytest.mark.slow
def test_many_candidates_are_screened_and_bos_is_never_left_out() -> None:
    """Of a single window no candidate is surely worse, so that all who are left run to the end."""
    model = decoder()
    calls: list[tuple[int, int]] = []
    found = choose_sink_tokens(
        model, text(1), list(range(20)), preferred=13,
        on_progress=lambda done, total: calls.append((done, total)),
    )  # fmt: skip
    assert len(found.trials) == 1 + sink_tokens.FINALISTS
    assert (13,) in {trial.tokens for trial in found.trials}
    assert calls[-1] == (24, 24)
    losses = {
        token: sum(losses_after_opening(sink_tokens.store_prefix(model, [token]), text(1)))
        for token in range(20)
    }
    least = min(losses, key=losses.__getitem__)
    assert (least,) in {trial.tokens for trial in found.trials}


def test_a_race_ends_as_if_all_had_been_measured() -> None:
    """Who is clearly worse leaves early; the rest is measured on every window."""
    generator = torch.Generator().manual_seed(0)
    added = torch.tensor([0.0, 0.001, 0.3, 0.5, *[1.0] * 8])
    table = 2 + added[:, None] + 0.1 * torch.randn(8, generator=generator)
    table = table + 0.002 * torch.randn(12, 8, generator=generator)
    windows = torch.arange(8)[:, None].expand(8, 128)
    read: dict[int, int] = {}

    def losses_of(token: int, rows: torch.Tensor) -> tuple[float, ...]:
        read[token] = read.get(token, 0) + rows.numel()
        return tuple(table[token, rows[:, 0]].tolist())

    def measured(token: int, rows: torch.Tensor) -> SinkTrial:
        return SinkTrial((token,), losses_of(token, rows), 0.01, 0.0)

    none = SinkTrial((), tuple(table[0].tolist()))
    whole = {token: measured(token, windows) for token in range(12)}
    read.clear()
    for preferred, known in ((None, {}), (1, {1: whole[1]}), (2, {})):
        trials = race_tokens(
            range(12), windows, losses_of=losses_of, begin=measured, known=known,
            preferred=preferred,
        )  # fmt: skip
        assert {0, 1} <= set(trials) <= {0, 1, 3}
        assert all(trial == whole[token] for token, trial in trials.items())
        expected = choose_sink_cure(none, whole, preferred=preferred, free=0.05)
        assert (
            choose_sink_cure(none, trials, preferred=preferred, free=0.05).token == expected.token
        )
    screened = sink_tokens.SCREENED[0] * sink_tokens.SCREENED[1]
    assert read[11] == 3 * screened
    assert read[2] == 3 * (screened + sink_tokens.SHARE_WINDOWS * 128)


@pytest.mark.parametrize("together", [1, 50, 10_000])
def test_windows_that_are_read_together_have_their_own_losses(together: int) -> None:
    found = losses_after_opening(decoder(), text(3), [7], together=together)
    alone = [losses_after_opening(decoder(), row[None], [7])[0] for row in text(3)]
    assert found == pytest.approx(alone, rel=1e-6)
