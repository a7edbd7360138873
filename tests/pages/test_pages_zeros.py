"""Logarithmic axes where a figure is zero: a zero would flatten every other value."""

import math
from dataclasses import replace
from typing import Any

import polars as pl
import pytest

from pages.synthetic import diagnosis
from wakeful.diagnosis.heads import describe_sink, round_up
from wakeful.diagnosis.measure import ModelDiagnosis
from wakeful.diagnosis.report import layer_charts
from wakeful.reports.charts import specification


def with_a_zero(metric: str) -> ModelDiagnosis:
    """Return a diagnosis whose first layer has zeros for a metric."""
    found = diagnosis("made", layers=3)
    here = (pl.col("metric") == metric) & (pl.col("layer") == 0)
    rows = found.rows.with_columns(value=pl.when(here).then(0.0).otherwise("value"))
    return replace(found, rows=rows)


def drawn(chart: Any) -> list[float]:
    """Return the values that a chart draws."""
    return [row["value"] for rows in specification(chart)["datasets"].values() for row in rows]


def curve(diagnoses: list[ModelDiagnosis], title: str) -> Any:
    """Return the curve over layers of that title."""
    return next(each.draw() for each in layer_charts(diagnoses) if each.heading == title)


@pytest.mark.parametrize("metric", ["kurtosis", "max_activation", "residual_peak"])
def test_a_layer_of_zeros_is_left_out_of_a_logarithmic_curve(metric: str) -> None:
    titles = {"kurtosis": "kurtosis, the rest", "max_activation": "mean max |x|, the rest",
              "residual_peak": "‖h₀‖ over the others' mean"}  # fmt: skip
    whole = drawn(curve([diagnosis("made", layers=3)], titles[metric]))
    some = drawn(curve([with_a_zero(metric)], titles[metric]))
    assert min(some) > 0
    assert len(some) < len(whole)


def test_zeros_of_a_linear_curve_are_drawn() -> None:
    assert min(drawn(curve([with_a_zero("value_drain")], "‖v₀‖ over the others' mean"))) == 0


@pytest.mark.parametrize("length", [2, 64, 128, 512, 1024])
def test_the_scale_of_entropies_ends_at_the_next_half(length: int) -> None:
    top = round_up(length)
    assert top % 0.5 == 0
    assert 0 <= top - math.log(length) < 0.5


def test_no_token_is_named_where_sequences_are_led_by_different_ones() -> None:
    found = diagnosis("made", layers=3)
    here = (pl.col("metric") == "leading_key") & pl.col("head").is_null()
    assert describe_sink(found)
    # Sequences led by tokens 0 and 2: a mean of 1, a token that leads nowhere.
    apart = found.rows.with_columns(
        value=pl.when(here).then(1.0).otherwise("value"),
        standard_error=pl.when(here).then(1.0).otherwise("standard_error"),
    )
    assert not describe_sink(replace(found, rows=apart))
