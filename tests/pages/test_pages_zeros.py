"""Logarithmic axes where a figure is zero: a zero would flatten every other value."""

from dataclasses import replace
from typing import Any

import polars as pl
import pytest

from pages.synthetic import diagnosis
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


@pytest.mark.parametrize("metric", ["kurtosis", "residual_peak"])
def test_a_layer_of_zeros_is_left_out_of_a_logarithmic_curve(metric: str) -> None:
    titles = {"kurtosis": "kurtosis, the rest", "residual_peak": "‖h₀‖ over the others' mean"}
    whole = drawn(curve([diagnosis("made", layers=3)], titles[metric]))
    some = drawn(curve([with_a_zero(metric)], titles[metric]))
    assert min(some) > 0
    assert len(some) < len(whole)


def test_zeros_of_a_linear_curve_are_drawn() -> None:
    assert min(drawn(curve([with_a_zero("value_drain")], "‖v₀‖ over the others' mean"))) == 0
