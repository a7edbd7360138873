"""Figures that are not finite: dead layers and overflows end in words, not in a traceback."""

import json
import math
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import torch

from evaluation.models import loaded_llama
from pages.synthetic import damage, diagnosis
from wakeful.diagnosis.measure import diagnose_model
from wakeful.diagnosis.report import diagnosis_report
from wakeful.diagnosis.verdict import diagnosis_summary, findings
from wakeful.errors import WakefulError
from wakeful.quantization.damage import (
    Damage,
    damage_findings,
    damage_summary,
    layer_errors,
    scheme_figures,
)
from wakeful.quantization.report import quantization_report
from wakeful.reports.html import write_page


def with_values(found: Damage, metric: str, value: float, *, layer: int) -> Damage:
    """Return the damage with another value of a metric in one layer."""
    here = (pl.col("metric") == metric) & (pl.col("layer") == layer)
    layers = found.measurement.layers.with_columns(
        value=pl.when(here).then(pl.lit(value)).otherwise("value")
    )
    return replace(found, measurement=replace(found.measurement, layers=layers))


def test_a_loss_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    loaded = loaded_llama(tmp_path / "llama")
    with torch.no_grad():
        loaded.module.get_output_embeddings().weight[3, 5] = float("nan")  # pyright: ignore
    with pytest.raises(WakefulError, match="llama's loss is not finite: the model is damaged"):
        diagnose_model(loaded, [list(range(8))])


def test_a_layer_that_is_lazy_is_counted_and_named() -> None:
    found = diagnosis("made", layers=1)
    lazy = pl.when(pl.col("metric") == "lazy").then(1.0).otherwise("value")
    said = findings(replace(found, rows=found.rows.with_columns(value=lazy)))[1].text
    assert "1 of 1 layers are lazy (0)" in said


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_diagnosis_says_what_is_not_finite(tmp_path: Path, value: float) -> None:
    found = diagnosis("made")
    metrics = ("value_drain", "kurtosis", "max_activation")
    rows = found.rows.with_columns(
        value=pl.when(pl.col("metric").is_in(metrics)).then(pl.lit(value)).otherwise("value")
    )
    broken = replace(found, rows=rows)
    figures = diagnosis_summary(broken)
    json.dumps(figures, allow_nan=False)
    assert figures["value_drain_lowest"] is None
    assert figures["kurtosis_first"] is None
    drained, outliers = findings(broken)[2:]
    assert drained.text.endswith("all values are zero.")
    assert outliers.level == "bad"
    assert outliers.text.startswith("Mean kurtosis is not finite at the first token")
    if math.isnan(value):  # one page is enough
        write_page(diagnosis_report([broken], title="page", method={}), tmp_path / "page.html")


@pytest.mark.slow
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_layer_without_a_relative_error_is_not_the_worst(tmp_path: Path, value: float) -> None:
    found = with_values(damage("made", lost=0.01), "relative_error", value, layer=0)
    found = with_values(found, "input_kurtosis", value, layer=0)
    figures = damage_summary(found)
    json.dumps(figures, allow_nan=False)
    (scheme,) = figures["schemes"]
    assert (scheme["worst_layer"], scheme["layer_error_worst"]) == ("layers.1.mlp", 0.1)
    assert scheme["layer_error_median"] == 0.1
    assert "The worst layer, layers.1.mlp, is off by 10.0%" in damage_findings(found)[0].text
    if math.isnan(value):
        write_page(quantization_report(found), tmp_path / "page.html")


def test_no_layer_with_a_relative_error_has_none_that_is_worst() -> None:
    found = with_values(damage("made", lost=0.01), "relative_error", float("nan"), layer=0)
    found = with_values(found, "relative_error", float("nan"), layer=1)
    assert layer_errors(found, "fine")["value"].to_list() == [None, None]
    assert scheme_figures(found, "fine")["layer_error_worst"] is None
    assert damage_findings(found)[0].text.endswith("No layer's relative error is finite.")
