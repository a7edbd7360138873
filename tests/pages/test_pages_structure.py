"""What every page has: a verdict in short, what to do next, contents, and charts that draw."""

import html
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

import wakeful.reports.html as html_pages
from pages.browser import browsed, needs_browser
from pages.synthetic import damage, diagnosis, inheritance
from pages.test_report import make_comparison, make_run
from wakeful.diagnosis.report import after_cure, diagnosis_report, layer_charts
from wakeful.estimates import format_interval
from wakeful.evaluation.report import evaluation_report, score_headlines
from wakeful.inheritance.report import inheritance_report
from wakeful.quantization.report import matrix_report, quantization_report
from wakeful.reporting.tool import report
from wakeful.reports.charts import slug, specification
from wakeful.reports.html import write_page
from wakeful.reports.value import Part, listed, rough
from wakeful.scores import Score
from wakeful.training.charts import metric_charts, relative_loss_chart
from wakeful.training.compared import read_comparison
from wakeful.training.report import comparison_headline, comparison_report


def score(model: str, shift: float) -> Score:
    values = np.linspace(1.0, 2.0, 8) + shift + 0.001 * np.arange(8)
    return Score(
        model=model, task="text", metric="bits per byte", keys=tuple(map(str, range(8))),
        values=values, weights=np.ones(8), higher_is_better=False,
    )  # fmt: skip


def text_of(page: Path) -> str:
    """Return what a reader sees above the end of the page, without scripts and pictures."""
    shown = page.read_text().split("<main>")[1].split("</main>")[0]
    left_out = "|".join(f"<{tag}.*?</{tag}>" for tag in ("script", "noscript", "svg", "pre"))
    return re.sub(f"(?s){left_out}", "", shown)


def _comparison(folder: Path, out: Path) -> Path:
    found = read_comparison(make_comparison(folder / "c", {"a": 0.0, "b": -0.5}, [0, 1]))
    return write_page(comparison_report(found, title="t"), out)


def _one_run(folder: Path, out: Path) -> Path:
    found = read_comparison(make_run(folder / "x", "x"))
    return write_page(comparison_report(found, title="t"), out)


def _evaluation(_: Path, out: Path, shifts: Sequence[float]) -> Path:
    scores = [score(name, shift) for name, shift in zip("ab", shifts, strict=False)]
    return write_page(evaluation_report(scores, title="t", method=METHOD, sources=["my a"]), out)


def _diagnosis(_: Path, out: Path, names: Sequence[str], **more: Any) -> Path:
    found = list(map(diagnosis, names))
    return write_page(diagnosis_report(found, title="t", method=METHOD, **more), out)


def _cure(folder: Path, out: Path) -> Path:
    done, steps = [("Rotation", "turned")], after_cure("a", folder)
    return _diagnosis(folder, out, ("a", "b"), done=done, steps=steps)


def _quantization(_: Path, out: Path, saved: dict[str, Any] | None = None) -> Path:
    found = damage("a", lost=-0.01)
    return write_page(quantization_report(found, method=METHOD, saved=saved), out)


def _matrix(_: Path, out: Path) -> Path:
    harmed = [damage("a", lost=0.01), damage("b", lost=2.0)]
    return write_page(matrix_report(harmed, method=METHOD, sources=["my a", "b"]), out)


METHOD = {"Machine": "m"}
KINDS = {
    "comparison": _comparison,
    "one run": _one_run,
    "evaluation": partial(_evaluation, shifts=(0.0, -0.5)),
    "one model": partial(_evaluation, shifts=(0.0,)),
    "diagnosis": partial(_diagnosis, names=("a",)),
    "diagnosis of two": partial(_diagnosis, names=("a", "b")),
    "cure": _cure,
    "inheritance": lambda folder, out: write_page(
        inheritance_report(inheritance(folder / "i")), out
    ),
    "quantization": _quantization,
    "saved quantization": partial(_quantization, saved={"folder": "small", "bytes": 2}),
    "matrix": _matrix,
}
"""What writes the page of each kind, given a folder to work in."""


@pytest.fixture(scope="module", params=KINDS)
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the page of each kind, built once."""
    folder = tmp_path_factory.mktemp("page")
    return KINDS[request.param](folder, folder / "page.html")


@pytest.mark.slow
def test_a_page_begins_with_a_verdict_and_says_what_to_do_next(page: Path) -> None:
    text = text_of(page)
    begin = text.index('class="verdict"')
    assert begin < text.index("<h2")
    short = text[begin : text.index("</section>")]
    assert re.search(r"<p><b>[^<]+\.</b></p>", short)
    assert re.search(r"<code>wakeful [a-z]+ [^<]+</code>", short)


@pytest.mark.slow
def test_every_part_is_in_the_contents(page: Path) -> None:
    text = text_of(page)
    parts = re.findall(r'<h2 id="([^"]+)">', text)
    assert len(parts) == text.count("<h2")
    if "<nav" in text:
        assert re.findall(r'<a href="#([^"]+)">', text.partition("</nav>")[0]) == parts


def test_no_hyphen_stands_for_a_minus(page: Path) -> None:
    assert not re.search(r"[>\s(]-\d", text_of(page))


def test_an_evaluation_says_which_model_is_surely_better() -> None:
    assert score_headlines([score("a", 0.0)])[0].startswith("a reaches text: bits per byte 1.")
    said = score_headlines([score("a", 0.0), score("b", -0.5), score("c", 0.0)])
    assert said == [
        "Against a, b is better in text: bits per byte.",
        "Against a, c is not significantly different in text: bits per byte.",
    ]
    one = [
        replace(score(name, shift), keys=("all",), values=np.ones(1), weights=np.ones(1))
        for name, shift in (("a", 0.0), ("b", 1.0))
    ]
    words = "Against a, b is not judged, without a standard error, in text: bits per byte."
    assert score_headlines(one) == [words]


@pytest.mark.slow
def test_a_diagnosis_shows_intervals_in_its_table_and_bands(tmp_path: Path) -> None:
    """Of two sequences, 12.7 standard errors to either side."""
    found = diagnosis("a")
    page = write_page(diagnosis_report([found]), tmp_path / "r.html").read_text()
    assert format_interval(found.loss, found.loss_error, 2) in page
    assert "one standard error" not in page
    titles = {chart.heading: chart for chart in layer_charts([found])}
    chart = specification(titles["‖v₀‖ over the others' mean"].draw())
    (drawn, *_) = (row for rows in chart["datasets"].values() for row in rows if "low" in row)
    rows = found.rows.filter(metric="value_drain", position="first", variant="paper")
    row = rows.row(0, named=True)
    half = 12.706 * row["standard_error"]
    ends = (row["value"] - half, row["value"] + half)
    assert (drawn["low"], drawn["high"]) == pytest.approx(ends, rel=1e-3)


@pytest.mark.slow
def test_a_comparison_counts_what_is_sure(tmp_path: Path) -> None:
    folder = make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5, "d": 0.3}, [0, 1, 2])
    assert comparison_headline(read_comparison(folder)) == (
        "Validation loss compared with a: of 2 variants, 1 lower and 1 higher."
    )
    for other, said in ((-0.5, "lower than"), (0.0, "not significantly different from")):
        folder = make_comparison(tmp_path / f"{other}", {"a": 0.0, "b": other}, [0, 1, 2])
        words = f"The validation loss of b is {said} that of a."
        assert comparison_headline(read_comparison(folder)) == words


def test_the_template_draws_every_kind_of_part() -> None:
    template = Path(html_pages.__file__).with_name("templates") / "part.html.j2"
    drawn = re.findall(r'kind == "(\w+)"', template.read_text("utf-8"))
    assert {part.__name__ for part in get_args(Part)} == {*drawn} - {"shapes"}


def test_names_are_listed_as_english_does() -> None:
    assert listed(["a"]) == "a"
    assert listed(["a", "b", 3]) == "a, b and 3"


def test_a_chart_has_color_and_dash(tmp_path: Path) -> None:
    found = read_comparison(make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5}, [0, 1]))
    drawn = [relative_loss_chart(found), *(each.drawing for each in metric_charts(found))]
    for chart in drawn:
        assert chart is not None
        assert "strokeDash" in str(chart.to_dict())


@pytest.mark.slow
def test_a_report_writes_its_charts_for_a_paper(tmp_path: Path) -> None:
    folder = make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5}, [0, 1])
    done = report(folder, out=tmp_path / "r.html", figures=("svg", "png"))
    titles = [title for title, _ in done.charts()]
    assert len(titles) == 3
    assert len(set(titles)) == len(titles)
    for suffix, begin in (("svg", b"<svg"), ("png", b"\x89PNG")):
        files = {path.stem: path for path in (tmp_path / "figures").glob(f"*.{suffix}")}
        assert set(files) == {slug(title) for title in titles}
        assert all(path.read_bytes().startswith(begin) for path in files.values())
    svg = (tmp_path / "figures" / "training-loss.svg").read_text()
    assert "Training loss" in svg
    assert "training step" in svg


def test_noise_leaves_three_digits() -> None:
    assert [rough(each) for each in (58_936.4, 7.314, 0.0213, 0.0)] == [
        "58,900",
        "7.31",
        "0.0213",
        "0",
    ]


def test_a_titles_file_name_is_plain() -> None:
    assert slug("‖v₀‖ over the others' mean") == "v0-over-the-others-mean"
    assert slug("max |x|, first token (of π)") == "max-x-first-token-of-pi"


_FRAME = """<!doctype html>
<iframe src="{page}#{theme}" width="{width}" height="900" style="border:0"></iframe>
<pre id="told"></pre>
<script>
const frame = document.querySelector("iframe");
const wait = (time) => new Promise((done) => setTimeout(done, time));
frame.addEventListener("load", async () => {{
  const page = frame.contentDocument;
  const root = page.documentElement;
  for (const details of page.querySelectorAll("details")) details.open = true;
  while (!root.dataset.drawn) await wait(50);
  await wait(3000);
  const [room, taken] = [root.clientWidth, Math.max(root.scrollWidth, page.body.scrollWidth)];
  const told = {{ room, taken, drawn: root.dataset.drawn, html: root.outerHTML }};
  document.getElementById("told").textContent = JSON.stringify(told);
}});
</script>"""
"""A page in a frame: no window of a browser is as narrow as a phone's."""


@pytest.mark.long
@needs_browser
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 390])
def test_a_browser_draws_every_chart_without_an_error(
    page: Path, width: int, theme: str, tmp_path: Path
) -> None:
    frame = tmp_path / "frame.html"
    frame.write_text(_FRAME.format(page=page.as_uri(), width=width, theme=theme))
    done = browsed(
        frame, "--allow-file-access-from-files", "--hide-scrollbars", "--window-size=1500,1000"
    )
    assert "CONSOLE" not in done.stderr
    (told,) = re.findall('(?s)<pre id="told">(.+?)</pre>', done.stdout)
    told = json.loads(html.unescape(told))
    assert told["drawn"] == theme
    assert told["taken"] <= told["room"] == width
    specs = told["html"].count('class="spec"')
    shown = re.sub(r"(?s)<script.*?</script>", "", told["html"])
    assert "could not be drawn" not in shown
    assert shown.count('class="save"') == specs
    assert shown.count("mark-group role-frame root") == specs
