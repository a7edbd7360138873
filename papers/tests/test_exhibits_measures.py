"""What exhibits derive from runs, and how their claims are judged."""

import dataclasses
import math

import numpy as np
import polars as pl
import pytest

from wakeful.errors import WakefulError
from wakeful.probes.base import SCHEMA
from wakeful_papers.exhibits.derived import Results, figure_rows, row_figure, smooth
from wakeful_papers.exhibits.exhibit import Claim, read_exhibit
from wakeful_papers.exhibits.figures import Measurement, layer_curves
from wakeful_papers.exhibits.judge import judge_claims
from wakeful_papers.exhibits.outcomes import outcome_of

STEPS = np.arange(1.0, 101.0)


def results(rows: dict[tuple[str, str, int], Measurement], baseline: str = "vanilla") -> Results:
    return Results(baseline, {}, rows)


def trained(loss: np.ndarray, **figures: float) -> Measurement:
    return Measurement({"loss": float(loss[-1]), **figures}, {"train_loss": (STEPS, loss)})


def test_the_crossing_is_the_last_time_that_a_row_falls_behind() -> None:
    base = 10.0 - 0.05 * STEPS
    ahead_until = np.where(STEPS <= 40, -1.0, 1.0)
    found = results({
        ("", "vanilla", 0): trained(base),
        ("", "early", 0): trained(base + ahead_until),
        ("", "ahead", 0): trained(base - 1),
        ("", "behind", 0): trained(base + 1),
    })  # fmt: skip
    # The first whole window of ten steps in which +1 is not outweighed begins at step 36.
    assert row_figure(found, "", "early", 0, "crossing") == 36
    overtaken = {row: row_figure(found, "", row, 0, "overtaken") for row in ("early", "ahead")}
    assert overtaken == {"early": 1.0, "ahead": 0.0}
    assert row_figure(found, "", "vanilla", 0, "overtaken") is None
    assert row_figure(found, "", "ahead", 0, "crossing") is None
    assert row_figure(found, "", "ahead", 0, "crossing(bound=True)") == 91
    assert row_figure(found, "", "behind", 0, "crossing") == 1
    assert row_figure(found, "", "absent", 0, "crossing") is None
    assert row_figure(found, "", "vanilla", 0, "crossing") is None
    assert row_figure(found, "", "early", 0, "ahead") == pytest.approx(35 / 91)
    assert row_figure(found, "", "early", 0, "ahead(first=0.1)") == 1.0
    assert row_figure(found, "", "behind", 0, "ahead") == 0.0
    assert row_figure(found, "", "vanilla", 0, "ahead") is None


def test_curves_are_smoothed_as_the_paper_plots_them() -> None:
    """As analyze/plot_relative_loss.py: whole windows of 100 or 10 steps, at their first step."""
    values = np.random.default_rng(0).normal(size=1200)
    assert smooth(values) == pytest.approx(np.convolve(values, np.ones(100) / 100, mode="valid"))
    assert smooth(values[:999])[-1] == pytest.approx(values[989:999].mean())
    assert len(smooth(values[:999])) == 990
    assert smooth(values[:7]) == pytest.approx(values[:7].mean())


def test_a_crossing_that_is_not_reached_is_predicted_from_the_last_tenth() -> None:
    base = 10.0 - 0.05 * STEPS
    found = results({
        ("", "vanilla", 0): trained(base),
        ("", "rising", 0): trained(base - 1.5 + 0.01 * STEPS),
        ("", "falling", 0): trained(base - 0.01 * STEPS),
        ("", "early", 0): trained(base + np.where(STEPS <= 40, -1.0, 1.0)),
    })  # fmt: skip
    # Zero at step 150, which is the middle of the window that begins four and a half steps before.
    told = "crossing(predicted=True)"
    assert row_figure(found, "", "rising", 0, told) == pytest.approx(145.5)
    assert row_figure(found, "", "rising", 0, "crossing") is None
    assert row_figure(found, "", "falling", 0, told) is None
    assert row_figure(found, "", "early", 0, told) == 36


def test_figures_of_a_row_beside_the_baseline_and_over_groups() -> None:
    rows = {
        (str(place), row, 0): Measurement({"loss": loss, "n": 3.0 * place**0.5})
        for place in (4, 16, 64)
        for row, loss in (("vanilla", 2.0), ("r", 2.5))
    }
    found = Results("vanilla", {"4": 4.0, "16": 16.0, "64": 64.0}, rows)
    assert row_figure(found, "16", "r", 0, "over_baseline(figure='loss')") == 1.25
    assert row_figure(found, "16", "r", 0, "exponent(figure='n')") == pytest.approx(0.5)
    assert row_figure(found, "16", "r", 0, "exponent(figure='m')") is None
    assert row_figure(found, "16", "r", 0, "exponent(figure='loss')") == 0.0
    two = Results("vanilla", {"4": 4.0, "16": 16.0}, rows)
    assert row_figure(two, "16", "r", 0, "exponent(figure='n')") is None


def test_domains_count_alike_and_a_text_without_any_is_one() -> None:
    found = results({
        ("", "a", 0): Measurement({"loss": 3.9, "loss_code": 1.0, "loss_books": 4.0}),
        ("", "b", 0): Measurement({"loss": 3.9}),
    })  # fmt: skip
    assert row_figure(found, "", "a", 0, "mean_domain_loss") == 2.5
    assert row_figure(found, "", "b", 0, "mean_domain_loss") == 3.9


def test_the_papers_saving_of_parameters_follows_from_the_losses_it_prints() -> None:
    """Table 5 of Value Residual Learning gives the 10.4% of its abstract."""
    cells = read_exhibit("value-residual/table5").table.cells
    found = results({
        (group, row, 0): Measurement({
            "loss": float(cells[f"{group}.{row}", "mean_domain_loss"]), "parameters": parameters,
        })
        for group, parameters in (("m82", 82e6), ("m180", 180e6), ("m468", 468e6))
        for row in ("vanilla", "resformer")
    })  # fmt: skip
    assert row_figure(found, "m468", "resformer", 0, "parameter_saving") == pytest.approx(
        0.104, abs=0.0005
    )
    assert row_figure(found, "m468", "vanilla", 0, "parameter_saving") == 0.0


def test_savings_of_data_and_parameters() -> None:
    base = 10.0 - 0.05 * STEPS
    quicker = 10.0 - 0.1 * STEPS
    found = results({("", "vanilla", 0): trained(base), ("", "quick", 0): trained(quicker),
                     ("", "slow", 0): trained(base + 1)})  # fmt: skip
    # The mean of ten steps reaches the baseline's last mean after 52.25 of 100 steps.
    assert row_figure(found, "", "quick", 0, "data_saving") == pytest.approx(0.47, abs=0.01)
    # The baseline is at the slow row's last loss, 1 above its own, 20 of its 100 steps earlier.
    assert row_figure(found, "", "slow", 0, "data_saving") == pytest.approx(-0.2, abs=0.01)
    # The baseline saves nothing, even if its loss was by chance as low before.
    noisy = results({("", "vanilla", 0): trained(base + (STEPS > 80))})
    for each in (found, noisy):
        assert row_figure(each, "", "vanilla", 0, "data_saving") == 0.0

    def size(loss: float, parameters: float) -> Measurement:
        return Measurement({"loss": loss, "parameters": parameters})

    sizes = {("a", "vanilla", 0): size(4.0, 1e6), ("b", "vanilla", 0): size(3.0, 1e7),
             ("a", "res", 0): size(4.0 - math.log10(1.25), 1e6),
             ("b", "res", 0): size(3.0 - math.log10(1.25), 1e7),
             ("c", "vanilla", 0): size(9.0, 1e8), ("c", "res", 0): size(3.0, 1e8)}  # fmt: skip
    found = results(sizes)
    # A nat a decade: what gains log10 1.25 nats is worth 1.25 times the parameters.
    saved = row_figure(found, "b", "res", 0, "parameter_saving(groups=['a', 'b'])")
    assert saved == pytest.approx(1 - 1 / 1.25)
    alone = results({key: value for key, value in sizes.items() if key[0] == "b"})
    assert row_figure(alone, "b", "res", 0, "parameter_saving") is None
    # One slope for all seeds: the second's own has the wrong sign, and it is not left out.
    second = {
        ("a", "vanilla", 1): size(3.0, 1e6), ("b", "vanilla", 1): size(3.5, 1e7),
        ("a", "res", 1): size(2.9, 1e6), ("b", "res", 1): size(3.4, 1e7),
    }  # fmt: skip
    pooled = results(sizes | second)
    slope = -0.25 / math.log(10)  # a nat down a decade, and half a nat up
    for seed, gain in ((0, math.log10(1.25)), (1, 0.1)):
        saved = row_figure(pooled, "b", "res", seed, "parameter_saving(groups=['a', 'b'])")
        assert saved == pytest.approx(1 - math.exp(gain / slope))
    # A gain of more than the sizes' decade is beyond what they can tell, one of less is not.
    for gain, expected in ((-1.01, None), (-0.99, 1 - 10**-0.99), (1.01, None)):
        moved = {("a", "res", 0): size(4.0 + gain, 1e6), ("b", "res", 0): size(3.0 + gain, 1e7)}
        far = results({key: sizes[key] for key in sizes if key[0] != "c"} | moved)
        saved = row_figure(far, "b", "res", 0, "parameter_saving")
        assert saved == (None if expected is None else pytest.approx(expected))
    rising = results({key: value for key, value in (sizes | second).items() if key[2] == 1})
    assert row_figure(rising, "b", "res", 1, "parameter_saving") is None


def test_figures_of_layers() -> None:
    ranks = (np.arange(1, 5), np.array([40.0, 20.0, 2.0, 1.0]))
    found = results({("", "r", 0): Measurement({}, {"rank/paper/all": ranks})}, "r")
    expected = {"layers(metric='rank')": 15.75, "layers(metric='rank', part='late')": 1.5,
                "deepening(metric='rank')": -28.5, "lazy_layers": 0.5,
                "extreme(metric='rank', position='all')": 40.0,
                "extreme(metric='rank', position='all', least=True)": 1.0}  # fmt: skip
    expected |= {
        "layers(metric='rank', part='2/4')": 20.0, "layers(metric='rank', part='2/2')": 1.5,
        "deepening(metric='rank', part='4/4', than='1/4')": -39.0,
        "extreme(metric='rank', position='all', part='late')": 2.0,
    }  # fmt: skip
    for expression, value in expected.items():
        assert row_figure(found, "", "r", 0, expression) == value
    assert row_figure(found, "", "r", 0, "layers(metric='entropy')") is None
    for part in ("3/2", "0/2", "late "):
        with pytest.raises(WakefulError, match="part must be all, early, late or one like 1/3"):
            row_figure(found, "", "r", 0, f"layers(metric='rank', part={part!r})")
    assert [row["value"] for row in figure_rows(found, list(expected))] == list(expected.values())


def test_the_mean_rank_of_a_run_of_layers_is_avg_rank() -> None:
    """Table 4 of When Attention Collapses: layers 1–4, 5–8 and 9–12."""
    ranks = (np.arange(1, 13), np.array([8.4] * 4 + [9.48] * 4 + [1.22] * 4))
    found = results({("", "reference", 0): Measurement({}, {"rank/paper/all": ranks})})
    columns = [each.figure for each in read_exhibit("lazy/table4").table.columns[1:]]
    thirds = [row_figure(found, "", "reference", 0, each) for each in columns]
    assert thirds == pytest.approx([8.4, 9.48, 1.22])


def test_figures_that_compare_metrics_and_positions() -> None:
    places = np.arange(1, 3)
    seen = Measurement({}, {
        "c/eq3/all": (places, np.array([0.9, 0.7])), "c/eq6/all": (places, np.array([0.5, 0.1])),
        "e/code/all": (places, np.array([2.0, 4.0])),
        "e@0.5/code/all": (places, np.array([1.0, 1.0])),
        "i/code/first": (places, np.array([8.0, 6.0])),
        "i/code/rest": (places, np.array([2.0, 1.0])),
    })  # fmt: skip
    base = Measurement({}, {"c/eq3/all": (places, np.array([0.8, 0.8]))})
    found = results({("", "r", 0): seen, ("", "base", 0): base}, "base")
    expected = {
        "between(metric='c', variant='eq3', than_variant='eq6')": 0.5,
        "between(metric='e@0.5', than_metric='e', variant='code')": -2.0,
        "first_over_rest(metric='i', variant='code')": 5.0,
        "first_over_rest(metric='i', variant='code', largest=True)": 6.0,
        "layers_above(metric='c', variant='eq3')": 0.5,
    }
    for expression, value in expected.items():
        assert row_figure(found, "", "r", 0, expression) == pytest.approx(value)
    for absent in ("between(metric='c', variant='eq3', than_variant='eq9')",
                   "first_over_rest(metric='c', variant='eq3')"):  # fmt: skip
        assert row_figure(found, "", "r", 0, absent) is None


@pytest.mark.parametrize(
    ("direction", "difference", "expected"),
    [
        ("lower", -1.0, "confirmed"), ("lower", 1.0, "reversed"), ("higher", 0.1, "not resolved"),
        ("same", 0.1, "confirmed"), ("same", 2.0, "reversed"), ("same", 0.6, "not resolved"),
        ("not higher", -3.0, "confirmed"), ("not higher", 0.1, "confirmed"),
        ("not higher", 2.0, "reversed"), ("not higher", 0.9, "not resolved"),
    ],
)  # fmt: skip
def test_directions_are_judged_by_the_interval(direction, difference, expected) -> None:
    # Three seeds: the interval reaches 4.303 · 0.1 to both sides; the margin is 1.
    assert outcome_of(direction, (difference, 0.1), 3, 1.0 if direction != "higher" else 0.0) == (
        expected
    )
    assert outcome_of(direction, (difference, math.nan), 1, 1.0) == "not resolved"
    assert outcome_of(direction, None, 0, 1.0) == "not resolved"


def test_claims_are_paired_over_seeds_and_say_whether_the_size_fits() -> None:
    fig6 = read_exhibit("value-residual/fig6")
    rows = {}
    for seed, level in enumerate((3.0, 5.0, 4.0)):
        rows["", "vanilla", seed] = Measurement({"loss": level})
        rows["", "two", seed] = Measurement({"loss": level - 0.04 - 0.001 * seed})
    found = {each.says: each for each in judge_claims(fig6, results(rows), "tiny", ())}
    two = found["λ = 2 is below vanilla"]
    assert (two.outcome, two.seeds, two.published) == ("confirmed", 3, -0.039)
    assert two.difference == pytest.approx(-0.041)
    assert two.size is True
    assert found["λ = 1 is below vanilla"].outcome == "not run"
    assert found["λ = 1 is below vanilla"].difference is None


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize(
    ("direction", "apart", "expected"),
    [
        ("same", 0.1, "confirmed"), ("same", -0.49, "confirmed"), ("same", 0.49, "confirmed"),
        ("same", 0.51, "reversed"), ("same", -0.51, "reversed"),
        ("not higher", 0.49, "confirmed"), ("not higher", 0.51, "reversed"),
        ("not higher", -0.8, "confirmed"),
    ],
)  # fmt: skip
def test_the_margin_is_a_share_of_the_other_rows_mean(direction, apart, expected, sign) -> None:
    claim = Claim(says="n", row="ours", figure="n", direction=direction, same=0.1)
    found = dataclasses.replace(read_exhibit("value-residual/fig6"), claims=(claim,))
    rows = {}
    for seed, level in enumerate((4.0, 7.0, 4.0)):  # a tenth of the mean is 0.5
        rows["", "vanilla", seed] = Measurement({"n": sign * level})
        rows["", "ours", seed] = Measurement({"n": sign * level + apart + 0.001 * (seed - 1)})
    (told,) = judge_claims(found, results(rows), "tiny", ())
    assert told.difference == pytest.approx(apart)
    assert told.outcome == expected


def test_a_claim_without_a_group_is_judged_in_each_and_groups_can_be_compared() -> None:
    fig14 = read_exhibit("value-residual/fig14")
    later = Claim(says="later", row="s", figure="n", direction="higher", group="l8192",
                  than_group="l512")  # fmt: skip
    each = Claim(says="each", row="s", figure="n", direction="higher")
    number = Claim(says="a number", row="s", figure="n", direction="lower", than_value=7.0)
    found = dataclasses.replace(fig14, claims=(later, each, number))
    rows = {
        (group, row, seed): Measurement({"n": value + 0.1 * seed})
        for group, row, value in (("l512", "s", 5.0), ("l512", "vanilla", 1.0), ("l8192", "s", 9.0),
                                  ("l8192", "vanilla", 1.0))
        for seed in (0, 1)
    }  # fmt: skip
    told = judge_claims(found, results(rows), "tiny", ())
    assert [(one.says, one.group) for one in told] == [
        ("later", ""), ("each", "512 tokens"), ("each", "8,192 tokens"),
        ("a number", "512 tokens"), ("a number", "8,192 tokens"),
    ]  # fmt: skip
    assert [one.difference for one in told] == pytest.approx([4.0, 4.0, 8.0, -1.95, 2.05])
    assert told[0].outcome == "confirmed"


def test_layers_are_compared_with_one_another() -> None:
    layers = np.arange(1, 6)
    curves = {
        "rank/paper/all": (layers, np.array([5.0, 4.0, 1.0, 3.0, 1.0])),
        "mass_columns/paper/all": (layers, np.array([50.0, 40.0, 7.0, 30.0, 9.0])),
        "entropy/code/all": (layers, -np.array([5.0, 4.0, 1.0, 3.0, 1.0])),
    }
    found = results({("", "vanilla", 0): Measurement({}, curves)})

    def of(expression: str) -> float | None:
        return row_figure(found, "", "vanilla", 0, expression)

    assert of("where_least(metric='mass_columns', of='rank')") == 7
    assert of("correlation(metric='rank', to='entropy', to_variant='code')") == pytest.approx(-1)
    assert of("ratio(metric='mass_columns', to='rank')") == pytest.approx(136 / 14)
    assert of("ratio(metric='mass_columns', to='nothing')") is None
    assert of("correlation(metric='rank', to='entropy')") is None


def test_tasks_are_counted_that_keep_the_baselines_accuracy() -> None:
    found = results(
        {
            ("", "vanilla", 0): Measurement({"acc_a": 0.5, "acc_b": 0.8, "acc_c": 0.4}),
            ("", "small", 0): Measurement({"acc_a": 0.45, "acc_b": 0.7, "acc_c": 0.6}),
        }
    )
    told = "tasks_kept(figures=['acc_a', 'acc_b', 'acc_c'])"
    assert row_figure(found, "", "small", 0, told) == 2
    assert row_figure(found, "", "vanilla", 0, told) == 3
    assert row_figure(found, "", "small", 0, "tasks_kept(figures=['acc_a', 'acc_d'])") is None
    assert row_figure(found, "", "small", 0, "mean_of(figures=['acc_a', 'acc_b'])") == 0.575
    assert row_figure(found, "", "small", 0, "mean_of(figures=['acc_a', 'acc_d'])") is None
    with pytest.raises(WakefulError, match="or_above has 1 numbers, and there are 2 figures"):
        row_figure(found, "", "small", 0, "tasks_kept(figures=['acc_a', 'acc_b'], or_above=[0.5])")


@pytest.mark.parametrize(
    ("name", "derived", "expected"),
    [("table6", "tasks_kept", 7), ("table5-medium", "mean_of", 0.4808),
     ("table5-large", "mean_of", 0.4975)],
)  # fmt: skip
def test_the_papers_own_figures_come_to_what_it_counts(
    name: str, derived: str, expected: float
) -> None:
    table = read_exhibit(f"lazy/{name}").table
    seen = {
        ("", row, 0): Measurement(
            {key: value for (own, key), value in table.cells.items() if own == row}
        )
        for row in ("reference", "heir")
    }
    (told,) = (each.figure for each in table.columns if each.figure.startswith(derived))
    assert row_figure(results(seen, "reference"), "", "heir", 0, told) == pytest.approx(
        expected, abs=5e-5
    )


def test_convergence_is_judged_where_all_rows_were_evaluated() -> None:
    def evaluated(*points: tuple[float, float]) -> Measurement:
        steps, losses = zip(*points, strict=True)
        return Measurement({}, {"validation_loss": (np.array(steps), np.array(losses))})

    found = results({
        ("", "reference", 0): evaluated((20, 5.0), (40, 4.0)),
        ("", "twice", 0): evaluated((30, 4.0), (80, 3.0)),
        ("", "heir", 0): evaluated((0, 9.0), (10, 5.0), (20, 3.0), (30, 2.5), (40, 2.0)),
    }, "reference")  # fmt: skip
    assert row_figure(found, "", "heir", 0, "loss_over_training") == 2.5
    assert row_figure(found, "", "reference", 0, "loss_over_training") == 4.5
    assert row_figure(found, "", "twice", 0, "loss_over_training") == 3.5
    assert row_figure(found, "", "random", 0, "loss_over_training") is None
    own = Measurement({}, {"train_loss": (np.array([1, 2, 3]), np.array([6.0, 5.0, 4.0]))})
    batches = results({("", "vanilla", 0): own})
    told = "loss_over_training(curve='train_loss')"
    assert row_figure(batches, "", "vanilla", 0, told) == 5.0
    assert row_figure(batches, "", "vanilla", 0, "loss_over_training") is None


def test_a_loss_after_a_share_of_the_steps_is_of_that_step_alone() -> None:
    steps = np.array([0, 10, 500, 1000])
    curve = {"validation_loss": (steps, np.array([9.0, 5.0, 4.0, 3.0]))}
    found = results({("", "heir", 0): Measurement({}, curve), ("", "none", 0): Measurement({})})
    assert row_figure(found, "", "heir", 0, "loss_after(share=0.01)") == 5.0
    assert row_figure(found, "", "heir", 0, "loss_after(share=0.5)") == 4.0
    assert row_figure(found, "", "heir", 0, "loss_after(share=0.02)") is None
    assert row_figure(found, "", "none", 0, "loss_after(share=0.01)") is None


def test_gains_are_compared_between_pairs_of_groups() -> None:
    losses = {"few": 3.0, "many": 2.0, "large-few": 3.5, "large-many": 1.5}
    found = results(
        {(group, "heir", 0): Measurement({"loss": loss}) for group, loss in losses.items()}
    )
    told = "gains(figure='loss', of=['large-many', 'large-few'], than=['many', '{}'])"
    assert row_figure(found, "large-many", "heir", 0, told.format("few")) == -1.0
    assert row_figure(found, "large-many", "heir", 0, told.format("fewer")) is None


def test_a_claim_is_judged_at_its_own_scales_alone() -> None:
    claims = tuple(
        Claim(says=name, row="small", direction="lower", scales=scales)
        for name, scales in (("anywhere", ()), ("there", ("paper",)))
    )
    found = dataclasses.replace(read_exhibit("value-residual/fig6"), claims=claims)
    rows = results({("", row, 0): Measurement({"loss": 1.0}) for row in ("vanilla", "small")})
    assert [each.says for each in judge_claims(found, rows, "tiny", ())] == ["anywhere"]
    assert [each.says for each in judge_claims(found, rows, "paper", ())] == ["anywhere", "there"]


def test_near_rank_1_is_a_share_of_heads() -> None:
    rows = [
        *((layer, head, "all", "rank", "paper", 3.0, None, "exact") for layer in (0, 1)
          for head in range(4)),
        *((layer, None, "all", "near_rank_1", "paper", 1.0 + layer, None, "exact")
          for layer in (0, 1)),
    ]  # fmt: skip
    curves = layer_curves(pl.DataFrame(rows, schema=SCHEMA, orient="row"))
    assert curves["near_rank_1_share/paper/all"][1].tolist() == [0.25, 0.5]


def test_a_w_and_an_m_are_told_by_their_least_swing() -> None:
    def of(values: list[float], shape: str) -> float | None:
        layers = np.arange(1, len(values) + 1)
        found = results(
            {("", "vanilla", 0): Measurement({}, {"n/paper/all": (layers, np.array(values))})}
        )
        return row_figure(found, "", "vanilla", 0, f"swings(metric='n', shape='{shape}')")

    w = [4.0, 0.0, 2.0, 0.0, 4.0]
    assert of(w, "W") == pytest.approx(0.5)
    assert of(w, "M") == 0.0
    assert of([-each for each in w], "M") == pytest.approx(0.5)
    assert of([5.0, 4.0, 3.0, 2.0, 1.0, 0.0], "W") == 0.0
    assert of([4.0, 1.0, 0.0, 1.0, 2.0, 1.9, 0.0, 3.0, 4.0], "W") == pytest.approx(0.5)
    assert of([4.0, 0.0, 4.0], "W") == 0.0  # a V
    assert of([1.0] * 6, "W") == 0.0
    with pytest.raises(WakefulError, match="shape must be W or M, got 'V'"):
        of(w, "V")
