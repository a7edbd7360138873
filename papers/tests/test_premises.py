"""Claims that are not applicable: what they are about is absent, or the baseline passes too."""

import dataclasses
from typing import Any

import pytest

from wakeful.config.tables import from_table
from wakeful_papers.exhibits.derived import Results
from wakeful_papers.exhibits.exhibit import (
    Claim,
    Premise,
    exhibit_names,
    read_exhibit,
    usual_premise,
    usual_premises,
)
from wakeful_papers.exhibits.figures import Measurement
from wakeful_papers.exhibits.judge import Verdict, judge_claims
from wakeful_papers.exhibits.plan import plan_exhibit

OUTLIERS = Premise(says="outliers", figure="kurtosis_rest", above=10.0)
LESS: dict[str, Any] = {"says": "less", "row": "cure", "figure": "kurtosis_rest",
                        "direction": "lower", "premise": OUTLIERS}  # fmt: skip


def judged(
    values: dict[str, list[float]], measured: str = "kurtosis_rest", **claimed: Any
) -> Verdict:
    """Judge a claim on rows' values, one a seed."""
    rows = {
        ("", row, seed): Measurement({measured: value})
        for row, of_row in values.items()
        for seed, value in enumerate(of_row)
    }
    found = dataclasses.replace(read_exhibit("own/arena"), claims=(Claim(**(LESS | claimed)),))
    (told,) = judge_claims(found, Results("vanilla", {}, rows), "tiny", ())
    return told


def test_what_is_absent_cannot_be_lowered_and_the_verdict_says_by_what() -> None:
    told = judged({"vanilla": [2.9, 3.0, 3.1], "cure": [2.6, 2.7, 2.8]})
    assert (told.outcome, told.direct, told.premise) == (
        "not applicable", "confirmed", pytest.approx(3.0),
    )  # fmt: skip
    assert told.because == (
        "no outliers: kurtosis_rest of vanilla is 3.000 ± 0.058, above 10 asked"
    )
    there = judged({"vanilla": [20.0, 21.0, 22.0], "cure": [3.0, 4.0, 5.0]})
    assert (there.outcome, there.direct) == ("confirmed", None)
    assert there.because == ("outliers: kurtosis_rest of vanilla is 21.00 ± 0.58, above 10 asked")


@pytest.mark.parametrize(
    ("vanilla", "cure", "expected"),
    [
        # The cure brings what its baseline lacks: that is a reversal, whatever was presupposed.
        ([2.9, 3.0, 3.1], [30.0, 31.0, 32.0], "reversed"),
        # All intervals lie below the bar: neither has any, and nothing was reversed.
        ([2.9, 3.0, 3.1], [3.9, 4.0, 4.1], "not applicable"),
        # The means lie below it, but not the baseline's interval: a mean takes no reversal back.
        ([5.0, 9.0, 7.0], [6.0, 10.05, 8.05], "reversed"),
        ([20.0, 20.5, 21.0], [30.0, 30.4, 31.0], "reversed"),
        # Without a reversal the mean decides.
        ([5.0, 9.0, 7.0], [4.0, 7.95, 6.0], "not applicable"),
        ([2.0, 9.0, 7.0], [8.0, 9.0, 3.0], "not applicable"),
        ([2.0, 9.0, 7.0], [8.0, 99.0, 3.0], "not resolved"),
    ],
)
def test_a_premise_takes_no_true_reversal_back(
    vanilla: list[float], cure: list[float], expected: str
) -> None:
    told = judged({"vanilla": vanilla, "cure": cure})
    assert told.outcome == expected
    assert (told.direct is not None) == (expected == "not applicable")


def test_what_comes_back_must_be_in_one_of_the_rows() -> None:
    claim = {"direction": "higher", "than": "cured", "row": "sick",
             "premise": dataclasses.replace(OUTLIERS, row="vanilla")}  # fmt: skip
    some, none = [20.0, 21.0, 22.0], [3.0, 3.1, 3.2]
    rows = {"vanilla": some, "cured": none, "sick": [5.0, 5.1, 5.2]}
    assert judged(rows, **claim).outcome == "confirmed"
    assert judged(rows | {"vanilla": none}, **claim).outcome == "not applicable"
    assert judged(rows | {"vanilla": none, "sick": some}, **claim).outcome == "confirmed"


def test_a_premise_that_was_not_measured_is_said_and_changes_nothing() -> None:
    premise = dataclasses.replace(OUTLIERS, figure="kurtosis_first")
    told = judged({"vanilla": [2.9, 3.0, 3.1], "cure": [2.6, 2.7, 2.8]}, premise=premise)
    assert (told.outcome, told.premise) == ("confirmed", None)
    assert told.because == "whether there is outliers was not measured"


def test_a_number_that_the_baseline_passes_too_is_no_merit() -> None:
    claim = {"direction": "lower", "than_value": 10.0, "premise": None, "figure": "residual_peak"}

    def told(vanilla: float, cure: float, **more: Any) -> Verdict:
        rows = {"vanilla": vanilla, "cure": cure}
        rows = {name: [value - 0.1, value, value + 0.1] for name, value in rows.items()}
        return judged(rows, "residual_peak", **(claim | more))

    passes = told(5.0, 4.0)
    assert (passes.outcome, passes.direct) == ("not applicable", "confirmed")
    assert passes.because == "vanilla passes too, with 5.000 ± 0.058"
    assert told(15.0, 4.0).outcome == "confirmed"
    assert told(5.0, 15.0).outcome == "reversed"  # though vanilla passes
    assert told(15.0, 15.0).outcome == "reversed"
    assert told(5.0, 10.0).outcome == "not applicable"
    assert told(5.0, 4.0, alone=True).outcome == "confirmed"
    assert told(5.0, 4.0, row="vanilla").outcome == "confirmed"  # that it is there at all
    assert told(5.0, 4.0, row="absent").outcome == "not run"


def test_measures_beside_the_baseline_and_heirs_are_not_held_to_it() -> None:
    for name in ("lazy/table6", "value-residual/fig5-lengths"):
        found = read_exhibit(name)
        numbers = [claim for claim in found.claims if claim.than_value is not None]
        assert numbers
        rows = {
            (group, row, seed): Measurement({claim.figure: 20.0 for claim in numbers})
            for group in found.groups or {"": None}
            for row in (found.table.baseline, *{claim.row for claim in numbers})
            for seed in range(3)
        }
        told = judge_claims(found, Results(found.table.baseline, {}, rows), "paper", ("mmlu@5",))
        assert all(each.outcome != "not applicable" for each in told)


def test_usual_premises_are_of_the_row_that_has_less_or_of_the_baseline() -> None:
    claim = Claim(says="", row="ours", figure="max_activation_first", direction="lower")
    found = usual_premise(claim, "vanilla")
    assert found == Premise(says="outliers", figure="kurtosis_first", above=10.0)
    back = usual_premise(dataclasses.replace(claim, direction="higher"), "vanilla")
    assert back is not None
    assert back.row == "vanilla"
    weaker = dataclasses.replace(claim, figure="value_drain", direction="higher")
    drain = usual_premise(weaker, "vanilla")
    assert drain is not None
    assert (drain.below, drain.row) == (0.5, "")
    assert usual_premise(dataclasses.replace(claim, than_value=3.0), "vanilla") is None
    assert usual_premise(dataclasses.replace(claim, figure="loss"), "vanilla") is None
    figures = {claim.figure for name in exhibit_names() for claim in read_exhibit(name).claims}
    for usual in usual_premises():
        assert (usual.above is None) != (usual.below is None)
        assert usual.why.endswith(".")
        assert any(
            usual_premise(Claim(says="", row="", figure=each, direction="lower"), "v")
            for each in figures
        )


def test_a_claim_keeps_a_premise_of_its_own_and_an_exhibit_has_one_for_all() -> None:
    own = from_table(Claim, {
        "says": "s", "row": "r", "direction": "lower",
        "premise": {"says": "a sink", "figure": "bos_mass_other", "row": "vanilla", "above": 0.1},
    })  # fmt: skip
    assert own.premise == Premise(says="a sink", figure="bos_mass_other", row="vanilla", above=0.1)
    for claim in read_exhibit("lazy/fig17").claims:
        assert claim.premise is not None
        assert claim.premise.says == "lazy layers"


def test_what_the_paper_neither_says_nor_measures_so_is_counted_apart() -> None:
    def bases(name: str) -> dict[str, set[str]]:
        found, plan = read_exhibit(name), plan_exhibit(read_exhibit(name), "tiny")
        rows = {
            (group, row, 0): Measurement({"loss": 1.0})
            for group in found.groups or {"": None}
            for row in (found.table.baseline, *(claim.row for claim in found.claims))
        }
        told = judge_claims(
            found, Results(found.table.baseline, {}, rows), "tiny", plan.tasks, plan.stand_in_rows
        )
        return {each.says: {each.basis} for each in told}

    table = bases("activation/table2")
    assert table["softmax-1, Adam: perplexity"] == {"read off a table's cells"}
    assert table["both together lower kurtosis, rest, below that of softmax-1 alone"] == {""}
    assert bases("value-residual/table1")["ResFormer ends below vanilla"] == {
        "loss in place of accuracy"
    }
    assert set.union(*bases("lazy/fig11").values()) == {"a stand-in's"}
    assert set.union(*bases("lazy/fig20").values()) == {"a stand-in's"}
    assert set.union(*bases("value-residual/fig7").values()) == {""}


def test_a_claim_that_no_run_has_measured_is_not_run_whatever_its_premise_row_lacks() -> None:
    told = judged({"cure": [2.6, 2.7, 2.8]})
    assert (told.outcome, told.direct) == ("not run", None)
    assert told.because == "whether there is outliers was not measured"
    assert told.beside == "vanilla"
    assert told.asked == "outliers: kurtosis_rest above 10 asked"


@pytest.mark.parametrize(
    ("cure", "within", "outcome"),
    [
        # Against a gain of 0.027 that another method has: it gains less, it gains more, or either.
        ([2.99, 3.00, 2.995], 0.027, "confirmed"),
        ([2.90, 2.91, 2.905], 0.027, "reversed"),
        ([2.99, 3.00, 2.995], 0.001, "not resolved"),
    ],
)
def test_what_does_not_help_gains_less_than_an_absolute_margin(
    cure: list[float], within: float, outcome: str
) -> None:
    claim = {"direction": "not lower", "within": within, "premise": None, "figure": "loss"}
    assert judged({"vanilla": [3.0, 3.0, 3.0], "cure": cure}, "loss", **claim).outcome == outcome


def test_what_its_setting_was_chosen_for_is_counted_apart() -> None:
    rows = {"vanilla": [20.0, 21.0, 22.0]}
    claim = {"row": "vanilla", "direction": "higher", "than_value": 10.0, "premise": None}
    told = judged(rows, **claim, by_construction=True)
    assert (told.outcome, told.basis, told.beside) == ("confirmed", "by construction", "10")


def test_a_competitor_that_fails_here_is_no_test_of_a_method_though_the_method_gains() -> None:
    gain = Premise(
        says="a gain by other", figure="over_baseline(figure='loss')", row="other", below=1.0,
        only=True,
    )  # fmt: skip
    claim = {"direction": "lower", "figure": "loss", "than": "other", "premise": gain}
    rows = {"vanilla": [3.0, 3.1, 3.2], "cure": [2.8, 2.9, 3.01], "other": [3.1, 3.2, 3.31]}
    told = judged(rows, "loss", **claim)
    assert (told.outcome, told.direct) == ("not applicable", "confirmed")
    assert told.because.startswith(
        "no gain by other: over_baseline(figure='loss') of other is 1.03"
    )
    rows["other"] = [2.9, 3.0, 3.11]
    assert judged(rows, "loss", **claim).outcome == "confirmed"


def test_questions_of_ours_are_counted_apart_and_margins_are_kept() -> None:
    rows = {"vanilla": [3.0, 3.0, 3.0], "cure": [2.99, 3.0, 2.995]}
    claim = {"figure": "loss", "premise": None, "own": True}
    told = judged(rows, "loss", direction="not higher", same=0.01, **claim)
    assert (told.outcome, told.basis, told.margin) == ("confirmed", "of ours", pytest.approx(0.03))
    assert judged(rows, "loss", direction="lower", **claim).margin is None


def test_a_published_difference_is_expected_at_its_own_scales_alone() -> None:
    rows = {"vanilla": [20.0, 21.0, 22.0], "cure": [3.0, 4.0, 5.0]}
    assert judged(rows, published=-17.0).size is True
    there = judged(rows, published=-17.0, published_scales=("paper",))
    assert (there.published, there.size) == (None, None)
