"""Links between the pages lead to files and headings that there are."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("papers/**/*.md")]
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]*))?\)")


def text_of(page: Path) -> str:
    """Return a page without its blocks of code."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S)
    return re.sub(r"^    .*$|`[^`\n]*`", "", text, flags=re.M)


def anchors(page: Path) -> set[str]:
    """Return what a page's headings are called in links, as its host and the site call them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text("utf-8"), flags=re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_lead_to_files_and_headings() -> None:
    found = 0
    for page in PAGES:
        for name, anchor in LINK.findall(text_of(page)):
            found += 1
            place = (page.parent / name) if name else page
            assert place.is_file(), f"{page.name}: {name}"
            if anchor:
                assert anchor in anchors(place), f"{page.name}: {name}#{anchor}"
    assert found > 50


def site_tool() -> ModuleType:
    """Return tools/pages.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("pages_tool", ROOT / "tools" / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_of_the_site_link_to_files_of_the_site() -> None:
    beside = site_tool().BESIDE
    found = 0
    folders = ("docs/", "papers/docs/")
    shown = [page for folder in folders for page in ROOT.glob(f"{folder}**/*.md")]
    for page in (*map(ROOT.joinpath, beside.values()), *shown):
        linked = [name for name, _ in LINK.findall(text_of(page))]
        linked += re.findall(r'(?:src|href|srcset)="(?!https?:)([^"#]+)"', text_of(page))
        for name in filter(None, linked):
            found += 1
            place = (page.parent / name).resolve().relative_to(ROOT).as_posix()
            assert place.startswith(folders) or place in beside.values(), f"{page.name}: {name}"
    assert found > 50


def test_a_site_that_leads_nowhere_is_not_built(tmp_path: Path) -> None:
    (tmp_path / "reference").mkdir()
    (tmp_path / "one.html").write_text(
        '<h1 id="top">One</h1><a href="two.html#a">.</a><a href="https://example.org">.</a>'
        '<a href="reference">.</a><img src="data:image/png;base64,">'
    )
    (tmp_path / "two.html").write_text(
        '<a id="a" href="#b">.</a><a href="three.html">.</a><a href="one.html#up">.</a>'
        '<script src="https://example.org/script.js"></script><img src="none.png">'
    )
    (tmp_path / "formula.html").write_text("V'<em n_1>n = λ</em>, <em>not this</em>")
    (tmp_path / "404.html").write_text('<a href="/wakeful/none.html">.</a>')
    (tmp_path / "reference" / "index.html").write_text("")
    (tmp_path / "reference" / "wakeful.norms.html").write_text('<h2 id="wakeful.norms.Norm">.</h2>')
    found = site_tool().problems(tmp_path)
    missing = [each for each in found if "its page has no entry" in each]
    words = "its page has no entry"
    assert f"reference/wakeful.norms.html: wakeful.norms.RMSNorm is public, and {words}" in missing
    assert not any("wakeful.norms.Norm is" in each for each in missing)
    assert [each for each in found if each not in missing] == [
        "formula.html: a formula reads as emphasis: put it in `...`",
        "two.html: #b is no heading",
        "two.html: loads https://example.org/script.js",
        "two.html: none.png does not exist",
        "two.html: one.html#up is no heading",
        "two.html: three.html does not exist",
    ]
