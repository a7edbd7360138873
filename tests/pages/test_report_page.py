"""The page: what it may run, what it says of odd comparisons, and charts on their own.

The script that draws charts is bundled once and kept, and never taken damaged.
"""

import base64
import hashlib
import html
import io
import json
import re
from pathlib import Path

import pytest
import vl_convert
from rich.console import Console

from pages.test_report import make_comparison, make_run
from wakeful.reports.html import vega_bundle, write_page
from wakeful.reports.terminal import render_terminal
from wakeful.training.compared import read_comparison
from wakeful.training.report import comparison_report

# A link to a part of the page itself, href="#part-1", and a picture inside it ask for nothing.
_ASKS = (
    r"\b(srcset|action|data)\s*=|\bsrc\s*=(?!\"data:)|\bhref\s*=(?!\"#)|url\(|@import|<link|<base"
)


def written(path: Path, folder: Path) -> str:
    return write_page(
        comparison_report(read_comparison(folder), title="t"), path / "r.html"
    ).read_text()


@pytest.mark.slow
def test_only_the_two_scripts_that_are_named_by_their_hash_can_run(tmp_path: Path) -> None:
    page = written(tmp_path, make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5}, [0]))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    rules = html.unescape(policy[1])
    scripts = re.findall(r'<script type="module">(.*?)</script>', page, re.DOTALL)
    assert len(scripts) == 2
    for script in scripts:
        name = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{name}'" in rules
    assert "unsafe-eval" not in rules
    allowed = rules.partition("script-src")[2].partition(";")[0]
    assert "unsafe" not in allowed
    # Every other script element is data.
    assert len(re.findall(r"<script(?! type=\"application/json\")", page)) == 2


@pytest.mark.slow
def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    page = written(tmp_path, make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5}, [0]))
    outside = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(_ASKS, outside)
    assert not re.search(r"""\b(import|importScripts)\s*\(?\s*["']https?:""", page)


@pytest.mark.slow
def test_every_chart_of_the_page_is_json_without_nan(tmp_path: Path) -> None:
    folder = make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5, "d": 0.1}, [0, 1])
    (folder / "b" / "seed-0" / "run.json").unlink()
    (folder / "d" / "seed-1" / "run.json").unlink()
    (folder / "a" / "seed-1" / "run.json").unlink()
    page = written(tmp_path, folder)
    assert "b shares no seed with a." in page
    for spec in re.findall(r'class="spec"[^>]*>(.*?)</script>', page, re.DOTALL):
        assert "NaN" not in spec
        json.loads(spec)


@pytest.mark.slow
def test_the_page_says_what_differs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "x", "x"), make_run(tmp_path / "y", "y", shift=0.1)]
    comparison = read_comparison(runs)
    page = write_page(comparison_report(comparison, title="t"), tmp_path / "r.html").read_text()
    assert "What differs between the configurations" not in page
    config = runs[1] / "config.toml"
    config.write_text(config.read_text().replace("batch_size = 16", "batch_size = 8", 1))
    page = write_page(
        comparison_report(read_comparison(runs), title="t"), tmp_path / "r.html"
    ).read_text()
    assert "What differs between the configurations" in page
    assert ">train.batch_size = 8<" in page


def test_one_run_alone_has_a_page(tmp_path: Path) -> None:
    page = written(tmp_path, make_run(tmp_path / "x", "x"))
    assert "One variant: nothing to compare." in page


def test_a_name_does_not_steer_the_terminal(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "x", "x"), make_run(tmp_path / "y", "y\x1b[2J", shift=0.1)]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(render_terminal(comparison_report(read_comparison(runs))))
    assert "\x1b[2J" not in console.export_text()


@pytest.fixture
def bundles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[int]:
    made: list[int] = []

    def bundle() -> str:
        made.append(1)
        return "let a = 'é';\r\nlet b;\n"

    monkeypatch.setattr(vl_convert, "javascript_bundle", bundle)
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    vega_bundle.cache_clear()
    yield made
    vega_bundle.cache_clear()


def again() -> str:
    """As another process would ask."""
    vega_bundle.cache_clear()
    return vega_bundle()


def test_it_is_bundled_once(bundles: list[int]) -> None:
    assert again() == again() == again() == "let a = 'é';\r\nlet b;\n"
    assert len(bundles) == 1


def test_a_cache_that_cannot_be_written_is_done_without(bundles: list[int], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where a folder should be")
    assert again() == again()
    assert len(bundles) == 2
