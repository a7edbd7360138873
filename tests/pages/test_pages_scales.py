"""Axes and scales that charts of different pages share, and digits that errors allow."""

import json
import re
from pathlib import Path

from pages.synthetic import diagnosis, inheritance
from pages.test_report import make_comparison
from wakeful.diagnosis.heads import hidden_states
from wakeful.inheritance.report import inheritance_report
from wakeful.reports.charts import specification
from wakeful.reports.html import write_page
from wakeful.training.compared import read_comparison
from wakeful.training.report import comparison_report


def test_kept_and_left_out_layers_differ_in_more_than_color(tmp_path: Path) -> None:
    told = inheritance_report(inheritance(tmp_path / "i"))
    text = write_page(told, tmp_path / "page.html").read_text("utf-8")
    specs = map(json.loads, re.findall('class="spec"[^>]*>(.*?)</script>', text))
    (angles,) = (each["encoding"] for each in specs if "fill" in each.get("encoding", {}))
    assert angles["fill"]["scale"]["range"][1] == "transparent"
    assert angles["stroke"]["scale"]["range"][1] != "transparent"


def test_pictures_of_hidden_states_have_one_scale_on_every_page() -> None:
    found = diagnosis("a")
    rows = found.rows.filter(metric="hidden_picture")
    alone, both = hidden_states([("", rows)]), hidden_states([("a", rows), ("b", rows)])
    assert alone is not None
    assert both is not None
    of_one = specification(alone)["encoding"]
    of_two = specification(both)["spec"]["encoding"]
    assert of_one["color"]["scale"] == of_two["color"]["scale"]
    assert of_one["color"]["scale"]["domain"] == [0, 10000]
    assert of_one["color"]["legend"] == of_two["color"]["legend"]
    assert [each["title"] for each in of_one["tooltip"]] == ["position", "channel bin", "mean |x|"]


def test_the_ratio_of_speeds_has_the_digits_that_its_spread_allows(tmp_path: Path) -> None:
    folder = make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5}, [0, 1, 2])
    for seed, speed in enumerate((500.0, 600.0, 800.0)):
        file = folder / "b" / f"seed-{seed}" / "summary.json"
        summary = json.loads(file.read_text("utf-8"))
        file.write_text(json.dumps(summary | {"tokens_per_second": speed}), "utf-8")
    page = write_page(comparison_report(read_comparison(folder), title="t"), tmp_path / "r.html")
    ratios = re.findall("<small>×([^<]+)</small>", page.read_text("utf-8"))
    assert ratios == ["1.000", "1.000", "1", "1.000", "1.000", "0.94"]
