"""Ranks, fronts and losses at equal time of a comparison whose layout says what is better."""

import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest

from pages.test_report import make_comparison
from pages.test_report_reading import change_json
from wakeful.reports.charts import specification
from wakeful.reports.html import write_page
from wakeful.training.compared import ComparedRuns, read_comparison
from wakeful.training.report import comparison_report
from wakeful_papers.exhibits.exhibit import read_exhibit
from wakeful_papers.exhibits.filled import fill_table
from wakeful_papers.exhibits.ranks import (
    Front,
    Ranking,
    equal_time_differences,
    find_pareto_front,
    rank_variants,
)
from wakeful_papers.exhibits.run_figures import run_figure
from wakeful_papers.exhibits.table import Column, PublishedTable
from wakeful_papers.reports.layout import LAYOUTS
from wakeful_papers.reports.rank_charts import front_charts

SEEDS = [0, 1, 2]
SPREAD = (0.0, 0.3, -0.3)
KURTOSIS = {"vanilla": 9.0, "a": 5.0, "b": 7.0, "c": 9.0}
SHIFTS = {"vanilla": 0.0, "a": 0.4, "b": -0.4, "c": 0.0}


def ranked(folder: Path, diagnosis: dict[str, float], speeds: dict[str, float]) -> ComparedRuns:
    """Write a comparison laid out as the arena, evaluated every tenth step."""
    make_comparison(folder, SHIFTS, SEEDS)
    header = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**header, "layouts": ["own/arena"]}))
    for variant, shift in SHIFTS.items():
        for seed in SEEDS:
            place = folder / variant / f"seed-{seed}"
            summary: dict[str, Any] = json.loads((place / "summary.json").read_text())
            summary["tokens_per_second"] = speeds.get(variant, 640.0)
            # What a variant has of its own differs from seed to seed with it, c with vanilla.
            value = diagnosis[variant] + SPREAD[seed]
            summary["diagnosis"] = {"kurtosis_rest": value, "rank": 20.0 - value}
            summary["quantization"] = {"coarse": {"perplexity": 12.0, "increase": 2.0}}
            (place / "summary.json").write_text(json.dumps(summary))
            rows = pl.read_parquet(place / "metrics.parquet")
            tests = rows.filter(pl.col("step") % 10 == 0).with_columns(kind=pl.lit("validation"))
            # A straight line, so that what is read off between two evaluations is known.
            tests = tests.with_columns(loss=5.0 - pl.col("step") / 20 + shift)
            pl.concat([rows, tests]).write_parquet(place / "metrics.parquet")
    return read_comparison(folder)


ARENA = read_exhibit("own/arena").table


def ranks(comparison: ComparedRuns, table: PublishedTable = ARENA) -> Ranking:
    found = rank_variants(comparison, table)
    assert found is not None
    return found


def test_ranks_are_means_within_groups_then_over_them(tmp_path: Path) -> None:
    found = ranks(ranked(tmp_path / "c", KURTOSIS, {"a": 1280.0}))
    assert found.groups == ("loss", "outliers", "laziness", "quantization", "cost")
    rows = {row.variant: row for row in found.rows}
    # Kurtosis: a, b, then vanilla and c alike; the rank of attention, where more is better, too.
    outliers = {name: row.groups["outliers"] for name, row in rows.items()}
    assert outliers == {"vanilla": 3.5, "a": 1.0, "b": 2.0, "c": 3.5}
    assert {name: row.groups["laziness"] for name, row in rows.items()} == outliers
    assert {row.groups["quantization"] for row in found.rows} == {2.5}
    # Parameters and cache are all alike, and one is faster.
    assert {n: row.groups["cost"] for n, row in rows.items()} == pytest.approx(
        {"vanilla": 8 / 3, "a": 2.0, "b": 8 / 3, "c": 8 / 3}
    )
    losses = {name: row.groups["loss"] for name, row in rows.items()}
    assert (losses["b"], losses["a"]) == (1.0, 4.0)
    for row in found.rows:
        assert row.overall[0] == pytest.approx(sum(row.groups.values()) / 5)
    assert [row.overall[0] for row in found.rows] == sorted(row.overall[0] for row in found.rows)
    # c's loss is vanilla's in seed 0 (rank 2.5) and above it in the others (3): of 5 groups the
    # one that varies has the error 0.5/3.
    assert rows["c"].overall[1] == pytest.approx(0.5 / 3 / 5)
    assert rows["c"].half_width == pytest.approx(4.303 * rows["c"].overall[1])


def test_a_variant_like_the_baseline_is_said_to_be(tmp_path: Path) -> None:
    comparison = ranked(tmp_path / "c", KURTOSIS, {"c": 320.0})
    found = ranks(comparison)
    # Slower only: costs do not count. Its losses differ by 0.003 a seed: not separated.
    assert found.inseparable == ("c",)
    assert found.num_columns == 4
    page = write_page(comparison_report(comparison, title="t"), tmp_path / "page.html").read_text()
    assert (
        "Not significantly different from vanilla in any of the 4 ranked figures that are not "
        "costs: c."
    ) in page
    # What coarse adds is the same in all of them, and nothing to draw against.
    assert page.count("<h3>loss against") == len(found.fronts) - 1 == 3
    assert "Ranks of each variant" in page


def test_a_table_whose_own_baseline_was_not_trained_ranks_against_the_comparisons(
    tmp_path: Path,
) -> None:
    columns = (Column("kurtosis_rest", "kurtosis", better="lower", group="outliers"),)
    table = PublishedTable("t", "", "theirs", columns, {"theirs": "T", "a": "A"}, {})
    found = ranks(ranked(tmp_path / "c", KURTOSIS, {}), table)
    assert found.rows[0].variant == "a"
    assert found.inseparable == ("c",)


def test_the_table_has_the_trained_rows_and_the_measured_columns(tmp_path: Path) -> None:
    comparison = ranked(tmp_path / "c", KURTOSIS, {})
    table = fill_table(comparison, ARENA)
    assert [row.label for row in table.rows] == list(SHIFTS)
    assert not table.missing
    names = [column.figure for column in table.published.columns]
    assert names == ["loss", "kurtosis_rest", "rank", "damage_coarse", "parameters", "cache_bytes",
                     "step_milliseconds"]  # fmt: skip
    bold = {
        (row.variant, name)
        for row in table.rows
        for name, cell in zip(names, row.cells, strict=True)
        if cell.is_significant
    }
    assert bold == {(v, name) for v in "ab" for name in ("loss", "kurtosis_rest", "rank")}
    run = comparison.runs[0]
    assert run_figure(run, "damage_coarse") == pytest.approx(math.log(12 / 10))
    tokens_a_step = run.config.train.batch_size * run.config.train.length
    assert run_figure(run, "step_milliseconds") == pytest.approx(1000 * tokens_a_step / 640)


def test_at_equal_time_the_slower_of_two_is_read_off_its_curve(tmp_path: Path) -> None:
    # a takes 4/3 of vanilla's time, b 4/5 of it.
    found = equal_time_differences(ranked(tmp_path / "c", KURTOSIS, {"a": 480.0, "b": 800.0}))
    # After vanilla's 40 steps a has taken 30; when b has taken 40, vanilla has taken 32.
    assert found["a"] == pytest.approx((0.4 + 10 / 20, 0.0), abs=1e-9)
    assert found["b"] == pytest.approx((-0.4 - 8 / 20, 0.0), abs=1e-9)
    assert found["vanilla"] == (0.0, 0.0)


def test_what_no_curve_tells_has_no_loss_at_equal_time(tmp_path: Path) -> None:
    comparison = ranked(tmp_path / "c", KURTOSIS, {"a": 6400.0, "b": 0.0})
    # When a ends, vanilla has taken 4 steps, before its first evaluation; b has no speed.
    assert set(equal_time_differences(comparison)) == {"vanilla", "c"}
    rows = {row.variant: row for row in ranks(comparison).rows}
    assert rows["a"].same_time is None
    write_page(comparison_report(comparison, title="t"), tmp_path / "page.html")


def test_a_point_is_on_the_front_unless_another_is_better(tmp_path: Path) -> None:
    points = [(1, 9), (2, 5), (2, 5), (2, 6), (3, 5), (4, 1), (1, 10)]
    first, second = zip(*points, strict=True)
    assert find_pareto_front(first, second) == [True, True, True, False, False, True, False]
    (front,) = (
        front
        for front in ranks(ranked(tmp_path / "c", KURTOSIS, {})).fronts
        if front.column.figure == "rank"
    )
    assert front.points.filter("front")["variant"].to_list() == ["a", "b"]


def test_a_point_far_out_stands_at_the_edge_with_its_figure() -> None:
    losses = [2.80, 2.82, 2.84, 2.86, 2.88, 2.90, 5.33, 4.44, *[2.85] * 4]
    peaks = [14.0, 15.0, 16.0, 14.5, 15.5, 134.0, 15.0, 15.0, *[14.8] * 4]
    points = pl.DataFrame(
        {"variant": list("abcdefghijkl"), "x": peaks, "x_error": 0.1, "loss": losses,
         "loss_error": 0.01, "front": [True, *[False] * 11]}
    )  # fmt: skip
    column = Column("max_activation_rest", "max |x|", better="lower")
    (front,) = front_charts(
        SimpleNamespace(baseline="b"),
        SimpleNamespace(fronts=[Front(column, points)]),
    )
    drawn = specification(front.draw())
    rows = {row["variant"]: row for row in drawn["datasets"][drawn["layer"][1]["data"]["name"]]}
    assert {name for name, row in rows.items() if row["place"] == "beyond"} == set("fgh")
    labels = {name: row["label"] for name, row in rows.items() if row["label"]}
    # g and h meet at the upper edge, above the same x.
    assert labels == {"a": "a", "b": "b", "f": "f → 134", "g": "g ↑ 5.33, h ↑ 4.44"}
    assert rows["f"]["x_shown"] == pytest.approx(16 + 2 / 16)
    assert rows["f"]["x"] == 134
    assert rows["g"]["loss_shown"] == pytest.approx(2.90 + 0.1 / 16)
    assert all(rows[name]["x_shown"] == rows[name]["x"] for name in "abcdeghijkl")


def test_only_seeds_that_all_have_are_ranked(tmp_path: Path) -> None:
    ranked(tmp_path / "c", KURTOSIS, {})
    late = tmp_path / "c" / "b" / "seed-2" / "run.json"
    late.write_text(json.dumps({**json.loads(late.read_text()), "status": "running"}))
    found = ranks(read_comparison(tmp_path / "c"))
    assert found.seeds == (0, 1)
    unranked = "The variants are not ranked: they have no finished seed in common."
    assert unranked not in str(LAYOUTS["own/arena"](read_comparison(tmp_path / "c")))
    for variant, seeds in {"b": (1,), "c": (0,)}.items():
        for seed in seeds:
            place = tmp_path / "c" / variant / f"seed-{seed}" / "run.json"
            place.write_text(late.read_text())
    assert rank_variants(read_comparison(tmp_path / "c"), ARENA) is None
    assert unranked in str(LAYOUTS["own/arena"](read_comparison(tmp_path / "c")))


def test_a_figure_that_no_variant_has_with_all_seeds_draws_no_front(tmp_path: Path) -> None:
    ranked(tmp_path / "c", KURTOSIS, {})
    for variant in SHIFTS:
        place = tmp_path / "c" / variant / "seed-2" / "summary.json"
        summary = json.loads(place.read_text())
        place.write_text(json.dumps(summary | {"diagnosis": {"rank": 3.0}}))
    found = ranks(read_comparison(tmp_path / "c"))
    assert "kurtosis_rest" not in {front.column.figure for front in found.fronts}
    assert found.fronts


def test_one_seed_is_not_said_to_have_means_or_pairs_of_seeds(tmp_path: Path) -> None:
    ranked(tmp_path / "c", KURTOSIS, {})
    change_json(tmp_path / "c" / "run.json", {"seeds": [0]})
    comparison = read_comparison(tmp_path / "c")
    page = write_page(comparison_report(comparison, title="t"), tmp_path / "page.html").read_text()
    assert "± one standard error over validation windows" in page
    assert "; at equal time over seeds alone. " in page
    assert "One seed, which leaves no standard error." in page
    assert "Each point is a variant. " in page
    assert "paired over seeds" not in page
    assert "eans over seeds" not in page


def test_losses_after_other_tokens_are_not_called_equal(tmp_path: Path) -> None:
    ranked(tmp_path / "c", KURTOSIS, {})
    page = write_page(
        comparison_report(read_comparison(tmp_path / "c"), title="t"), tmp_path / "page.html"
    )
    assert "loss, equal tokens" in page.read_text()
    change_json(tmp_path / "c" / "b" / "seed-0" / "summary.json", {"tokens": 5120})
    page = write_page(
        comparison_report(read_comparison(tmp_path / "c"), title="t"), tmp_path / "page.html"
    )
    assert "loss, equal tokens" not in page.read_text()
    assert "loss, at the end" in page.read_text()
    assert "Not all were trained on equally many tokens." in page.read_text()
