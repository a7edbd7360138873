"""Charts of exhibits say what their axes and marks are."""

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import vl_convert

from exhibit_pages import reproduction
from wakeful.reports.charts import Drawing, specification, standalone_spec
from wakeful_papers.exhibits.derived import Results
from wakeful_papers.exhibits.exhibit import exhibit_names, read_exhibit
from wakeful_papers.exhibits.figures import Measurement
from wakeful_papers.reports.charts import ChartData, bars, over_groups, over_layers

PLACED = [name for name in exhibit_names() if "over_groups(" in str(read_exhibit(name).draw)]


def names(name: str, figure: str) -> ChartData:
    """Return an exhibit whose rows reach 1, 2, ... in a figure, one more with the second seed."""
    found = read_exhibit(name)
    places = {key: group.at for key, group in found.groups.items() if group.at is not None}
    seen = {
        (group, row, seed): Measurement({figure: 1.0 + n + seed}, {})
        for group in found.groups or ("",)
        for n, row in enumerate(found.table.labels)
        for seed in (0, 1)
    }
    return ChartData(found, Results(found.table.baseline, places, seen))


def words(chart: Drawing) -> list[str]:
    """Return the texts that a chart's file shows."""
    svg = ElementTree.fromstring(vl_convert.vegalite_to_svg(standalone_spec(specification(chart))))
    return [each.text or "" for each in svg.iter() if "}text" in each.tag]


@pytest.mark.parametrize("name", PLACED)
def test_a_chart_over_groups_says_what_their_places_are(name: str) -> None:
    for expression in read_exhibit(name).draw:
        assert not expression.startswith("over_groups(") or ", axis='" in expression


def test_the_axis_of_groups_has_its_name() -> None:
    found = names("value-residual/fig5-lengths", "loss")
    ((_, chart),) = over_groups(found, figure="loss", title="a loss", axis="tokens")
    assert {"a loss", "tokens", "vanilla", "ResFormer"} <= {*words(chart)}


def test_the_papers_own_figures_are_explained(tmp_path: Path) -> None:
    ((_, chart),) = bars(names("activation/table2", "kurtosis_rest"), figure="kurtosis_rest")
    assert "in the paper" in words(chart)
    ((_, chart),) = bars(names("activation/table2", "seconds"), figure="seconds")
    assert "in the paper" not in words(chart)
    page = reproduction(tmp_path / "page.html", "activation/table2", ["kurtosis_rest"])
    assert page.read_text("utf-8").count("open diamonds are the paper&#39;s") == 1


@pytest.mark.parametrize(
    ("metric", "scale"), [("rank", "log"), ("rank@elsewhere", "log"), ("entropy", None)]
)
def test_ranks_over_layers_have_a_logarithmic_axis(metric: str, scale: str | None) -> None:
    layers, found = np.arange(1.0, 4.0), read_exhibit("lazy/fig1-medium")
    curves = {0: np.array([1.0, 7.0, 30.0]), 1: np.array([1.2, 9.0, 40.0])}
    seen = {
        ("", "reference", seed): Measurement({}, {f"{metric}/paper/all": (layers, values)})
        for seed, values in curves.items()
    }
    names = ChartData(found, Results("reference", {}, seen))
    ((_, chart),) = over_layers(names, metric=metric)
    drawn = specification(chart)
    assert drawn["layer"][1]["encoding"]["y"]["scale"].get("type") == scale
    # A band that went to zero could not be drawn on it.
    lows = [row["low"] for rows in drawn["datasets"].values() for row in rows]
    assert min(lows) >= 1
