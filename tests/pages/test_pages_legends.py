"""Whoever meets a chart of several models by itself reads their names in it."""

import re
from collections.abc import Iterable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import vl_convert

from pages.browser import needs_browser, saved_by, with_script
from pages.synthetic import diagnosis
from wakeful.diagnosis.heads import draw_attention
from wakeful.diagnosis.report import diagnosis_report, layer_charts
from wakeful.reports.charts import Titled, save_figures, slug, specification, standalone_spec
from wakeful.reports.html import write_page

NAMES = ("HuggingFaceTB/SmolLM2-135M-Instruct", "the same, cured")
OF_EACH = re.compile("|".join(f"-of-{slug(name)}$" for name in NAMES))
"""What the file of one model's chart is called at the end."""
HEAD = re.compile(r"layer \d, head \d: first-token mass [01]\.\d\d, rank \d+$")


def words(svg: str) -> list[str]:
    """Return the texts that a drawing shows, not those that only a screen reader finds."""
    return [each.text or "" for each in ElementTree.fromstring(svg).iter() if "}text" in each.tag]


def written(charts: Titled, folder: Path) -> dict[str, list[str]]:
    """Return the words of each chart's file, by its name."""
    save_figures(charts, folder, ("svg",))
    return {path.stem: words(path.read_text("utf-8")) for path in folder.iterdir()}


def nameless(files: dict[str, list[str]], names: Iterable[str]) -> list[str]:
    """Return the files that do not show every name."""
    return [file for file, told in files.items() if not {*names} <= {*told}]


@pytest.mark.slow
def test_files_of_a_diagnosis_of_two_name_both(tmp_path: Path) -> None:
    files = written(diagnosis_report([diagnosis(name) for name in NAMES]).charts(), tmp_path)
    shared = {file: told for file, told in files.items() if not OF_EACH.search(file)}
    assert len(shared) == 6  # curves over layers
    assert len(files) > len(shared)
    assert nameless(shared, NAMES) == []


@pytest.mark.slow
def test_a_chart_of_one_model_has_no_legend() -> None:
    chart = layer_charts([diagnosis(NAMES[0])])[0].draw()
    svg = vl_convert.vegalite_to_svg(standalone_spec(specification(chart)))
    assert NAMES[0] not in words(svg)


@pytest.mark.slow
def test_a_file_says_which_head_it_shows(tmp_path: Path) -> None:
    files = written(diagnosis_report([diagnosis("a")]).charts(), tmp_path)
    told = files["attention-of-a-head-of-a"]
    assert any(HEAD.match(each) for each in told)


@pytest.mark.long
@needs_browser
def test_what_a_page_saves_names_both_models_and_the_head(tmp_path: Path) -> None:
    page = write_page(
        diagnosis_report([*map(diagnosis, NAMES)], title="t", method={}), tmp_path / "p.html"
    )
    saved = [words(svg) for svg in saved_by(page, 'main [aria-label$="as SVG"]')]
    curves = [told for told in saved if any(each.endswith("over layers") for each in told)]
    assert len(curves) == 6
    assert all({*NAMES} <= {*told} for told in curves)
    heads = [told for told in saved if any(each.startswith("Attention of") for each in told)]
    assert len(heads) == 2
    assert all(any(HEAD.match(each) for each in told) for told in heads)


CHOOSE = """<script>
const theme = () => document.documentElement.dataset.drawn;
const list = () => document.querySelector("main .vega-bind select");
const before = setInterval(() => {
  if (!theme()) return;
  clearInterval(before);
  list().value = "1";
  list().dispatchEvent(new Event("input", { bubbles: true }));
  list().dispatchEvent(new Event("change", { bubbles: true }));
  document.documentElement.dataset.drawn = "";
  document.getElementById("theme").click();
  const after = setInterval(() => {
    if (theme() !== "dark") return;
    clearInterval(after);
    document.querySelector('main [aria-label^="Save Attention of"][aria-label$="as SVG"]').click();
  }, 50);
}, 50);
</script>"""


@pytest.mark.long
@needs_browser
def test_a_chosen_head_stays_chosen_in_the_other_theme(tmp_path: Path) -> None:
    page = write_page(diagnosis_report([diagnosis("a")], title="t", method={}), tmp_path / "p.html")
    with_script(page, CHOOSE)
    (saved,) = [words(svg) for svg in saved_by(page, "none")]
    chart = draw_attention(diagnosis("a"))
    assert chart is not None
    (pick,) = [each for each in specification(chart)["params"] if each["name"] == "shown"]
    assert [each for each in saved if HEAD.match(each)] == [pick["bind"]["labels"][1]]
