"""A page of several models stays small enough to send and short enough to read."""

import html
import json
import re
from dataclasses import replace
from pathlib import Path

import polars as pl
import pytest
import vl_convert

from pages.browser import browsed, needs_browser, with_script
from pages.synthetic import diagnosis
from wakeful.diagnosis.heads import draw_attention
from wakeful.diagnosis.report import diagnosis_report, layer_charts
from wakeful.reports.charts import specification
from wakeful.reports.html import _pack_columns, write_page

SCREEN = 900
"""Pixels of a screen's height; its width is 1400."""
MEASURE = """<script>
const ready = setInterval(() => {
  if (!document.documentElement.dataset.drawn) return;
  clearInterval(ready);
  const titles = [...document.querySelectorAll("h2")];
  const title = titles.find((each) => each.textContent === "Glossary");
  const told = document.createElement("pre");
  told.id = "told";
  told.textContent = JSON.stringify({
    width: innerWidth,
    glossary: title.getBoundingClientRect().top + scrollY,
    open: document.querySelectorAll("details[open]").length,
    drawn: document.querySelectorAll(".save").length,
  });
  document.body.append(told);
}, 50);
</script>"""
"""Tells how far down the glossary begins, once the page is drawn."""
SMOLLM2 = {"layers": 30, "heads": 9, "groups": 3}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Give the page of four models of SmolLM2's shape."""
    four = [diagnosis(name, **SMOLLM2) for name in ("a", "b", "c", "d")]
    path = tmp_path_factory.mktemp("size") / "page.html"
    return write_page(diagnosis_report(four, title="t", method={}), path).read_text("utf-8")


@pytest.mark.slow
def test_four_models_make_two_megabytes_at_most(page: str) -> None:
    assert len(page.encode()) < 2_000_000


@pytest.mark.slow
def test_four_models_are_read_in_few_charts(page: str) -> None:
    """Six curves, attention and one map a model."""
    assert page.count('class="spec"') == 6 + 4 + 4
    assert page.count("The text that all of them read begins") == 1
    assert "The text it read begins" not in page


@pytest.mark.long
@needs_browser
def test_four_models_are_read_in_six_screens(page: str, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text(page, "utf-8")
    with_script(path, MEASURE)
    seen = browsed(path, "--hide-scrollbars", f"--window-size=1400,{SCREEN}").stdout
    (told,) = re.findall('<pre id="told">(.+?)</pre>', seen)
    told = json.loads(html.unescape(told))
    assert told["width"] == 1400
    assert told["open"] == 0
    assert told["drawn"] == 6 + 4 + 4
    assert 3 * SCREEN < told["glossary"] <= 6 * SCREEN


def test_rows_are_packed_without_loss() -> None:
    spec = specification(layer_charts([diagnosis("a"), diagnosis("b")])[0].draw())
    packed = json.loads(json.dumps(_pack_columns(spec)))
    name, table = max(packed["datasets"].items(), key=lambda entry: entry[1]["rows"])
    columns = [
        [told["names"][at] for at in told["at"]] if isinstance(told, dict) else told
        for told in table["columns"].values()
    ]
    assert table["rows"] >= 4
    rows = [dict(zip(table["columns"], row, strict=True)) for row in zip(*columns, strict=True)]
    assert rows == spec["datasets"][name]


def test_a_spec_without_rows_of_its_own_has_none_packed() -> None:
    told = {"mark": "point", "datasets": {}, "usermeta": {"legends": {}}}
    assert _pack_columns({"mark": "point"}) == told


def test_every_head_is_in_the_list_sinks_and_high_ranks_first() -> None:
    found = diagnosis("a", layers=10)
    chart = draw_attention(found)
    assert chart is not None
    spec = specification(chart)
    (pick,) = [each for each in spec["params"] if each["name"] == "shown"]
    named = pick["bind"]["labels"]
    assert pick["bind"]["options"] == [*range(len(named))]
    assert len(named) == len(set(named)) == 10 * 2  # each of all layers' heads, once
    ranks = [float(re.findall(r"rank (\d+)", name)[0]) for name in named]
    masses = [float(re.findall(r"mass ([\d.]+)", name)[0]) for name in named]
    assert masses[:8] == sorted(masses[:8], reverse=True)
    assert max(ranks) in ranks[:16]


def test_the_chosen_heads_weights_are_drawn_to_two_digits_and_holes_left_out() -> None:
    found = diagnosis("a", layers=1, heads=1)
    assert found.attention is not None
    bare = pl.col("query").eq(2) & pl.col("key").eq(1)
    cells = found.attention.with_columns(value=pl.when(bare).then(float("nan")).otherwise("value"))
    chart = draw_attention(replace(found, attention=cells))
    assert chart is not None
    svg = vl_convert.vegalite_to_svg(specification(chart))
    drawn = {
        (int(query), int(key)): float(weight)
        for key, query, weight in re.findall(r"key: (\d+); query: (\d+); weight: ([\d.e-]+)", svg)
    }
    told = {(query, key): value for query, key, value in
            cells.filter(~bare).select("query", "key", "value").iter_rows()}  # fmt: skip
    assert drawn == pytest.approx(told, abs=0.013)
