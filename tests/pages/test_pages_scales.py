"""Axes and scales that charts of different pages share, and digits that errors allow."""

import json
import re
from pathlib import Path

from pages.test_report import make_comparison
from wakeful.reports.html import write_page
from wakeful.training.compared import read_comparison
from wakeful.training.report import comparison_report


def test_the_ratio_of_speeds_has_the_digits_that_its_spread_allows(tmp_path: Path) -> None:
    folder = make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5}, [0, 1, 2])
    for seed, speed in enumerate((500.0, 600.0, 800.0)):
        file = folder / "b" / f"seed-{seed}" / "summary.json"
        summary = json.loads(file.read_text("utf-8"))
        file.write_text(json.dumps(summary | {"tokens_per_second": speed}), "utf-8")
    page = write_page(comparison_report(read_comparison(folder), title="t"), tmp_path / "r.html")
    ratios = re.findall("<small>×([^<]+)</small>", page.read_text("utf-8"))
    assert ratios == ["1.000", "1.000", "1", "1.000", "1.000", "0.94"]
