"""Names and texts of any characters are drawn, and nothing that was found is lost to a drawing."""

import xml.dom.minidom
from pathlib import Path
from typing import Any

import altair as alt
import polars as pl
import pytest

import wakeful
from pages.browser import browsed, needs_browser
from pages.synthetic import diagnosis
from training.runs import text, tiny
from wakeful.diagnosis.report import diagnosis_report
from wakeful.reports.charts import (
    draw_lines,
    drawable,
    encode_colors,
    opacity,
    save_chart,
    switchable,
)
from wakeful.reports.html import write_page
from wakeful.training.loop import train_run

__all__ = ["text"]
CHARACTERS = ["\0", "\x07", "\f", "\x1b", "\x1f", "\x7f", "\x85", "\u2028", "\u2029", "\ud800",
              "\ufffe", "\uffff", "\U0001ffff", "\n", "\t"]  # fmt: skip
RAN = "document.title='ran'"
MARKUP = [
    f"</script><script>{RAN}</script>", f"<img src=x onerror={RAN}>", "\"'onload='", "{{ 7*7 }}",
    "${7*7}", "%s", "\\", "&lt;", "]]>", "<!--",
]  # fmt: skip
NAMES = [*(f"a{each}b" for each in CHARACTERS), *MARKUP, " ", "null", "undefined"]


def charts(names: list[str]) -> list[Any]:
    frame = pl.DataFrame({"name": names * 2, "step": [0] * len(names) + [1] * len(names)})
    frame = frame.with_columns(loss=pl.col("step") * 1.5 + 1)
    x, y = alt.X("step:Q"), alt.Y("loss:Q", title=names[0])
    color, base = encode_colors("name", names), alt.Chart(frame)
    return [
        draw_lines(frame, "name", names, x, y, ["name:N"], at="step", legend=alt.Legend()),
        base.mark_bar().encode(x="loss:Q", y=alt.Y("name:N", sort=names), color=color),
        base.mark_bar().encode(x="loss:Q", y="name:N", column="name:N"),
        switchable(base.mark_point().encode(x=x, y=y, color=color, opacity=opacity("name"))),
        base.mark_text().encode(x=x, y=y, text="name:N"),
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(5))
def test_any_name_is_drawn(tmp_path: Path, number: int) -> None:
    names = [name for name in NAMES if "\ud800" not in name] + ["a\ufffdb"]
    chart = charts(names)[number]
    path = save_chart(chart, tmp_path / "chart.svg", title=names[5])
    drawn = xml.dom.minidom.parse(str(path)).toxml()
    assert "a\u241bb" in drawn  # the picture of an escape
    assert save_chart(chart, tmp_path / "chart.png").stat().st_size > 1_000


@pytest.mark.parametrize("name", NAMES)
def test_names_stay_apart_and_plain_ones_as_they_are(name: str) -> None:
    assert drawable("vanilla, λ=½ 日本") == "vanilla, λ=½ 日本"
    assert sum(drawable(name) == drawable(other) for other in MARKUP) <= 1


@pytest.mark.long
@needs_browser
def test_a_page_draws_any_name_and_runs_none(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    for policy in (True, False):
        models = [diagnosis(name) for name in ("a\0b", "a\u2028b", *MARKUP)]
        write_page(diagnosis_report(models, title=MARKUP[0], method={MARKUP[0]: MARKUP[1]}), page)
        if not policy:
            text = page.read_text("utf-8")
            page.write_text(text.replace("Content-Security-Policy", "X-None"), "utf-8")
        seen = browsed(page)
        assert "<title>ran</title>" not in seen.stdout
        assert "data-drawn" in seen.stdout
        assert "Error" not in seen.stderr


ODD_TEXT = "a form feed \f a zero \0 an escape \x1b and \uffff \ufffe \u2028 constructor toString\n"


VERBS = ("diagnose", "evaluate", "quantize")


def broken(*_args: object, **_options: object) -> str:
    raise RuntimeError("the drawing library fell")


@pytest.mark.slow
def test_a_text_of_odd_characters_is_diagnosed_and_kept_where_drawing_fails(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = text / "odd.txt"
    odd.write_text(ODD_TEXT * 40, "utf-8")
    run = tmp_path / "constructor"
    train_run(tiny(text), run)
    small: dict[str, Any] = {"text": str(odd), "length": 16, "num_sequences": 2}

    def made(verb: str, out: Path) -> list[str]:
        getattr(wakeful, verb)(run, out=str(out), **small)
        return sorted(path.name for path in out.iterdir())

    files = {verb: made(verb, tmp_path / f"{verb}-drawn") for verb in VERBS}
    monkeypatch.setattr("wakeful.reports.html.vega_bundle", broken)
    for verb in VERBS:
        out = tmp_path / verb
        with pytest.raises(RuntimeError, match="the drawing library fell"):
            made(verb, out)
        assert sorted([*(path.name for path in out.iterdir()), "report.html"]) == files[verb]
