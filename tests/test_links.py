"""Links between the pages lead to files and headings that there are."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]
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


def test_pages_of_the_site_link_to_files_of_the_site() -> None:
    # tools/pages.py imports MkDocs, which tests do without: its table is read from the source.
    tree = ast.parse((ROOT / "tools" / "pages.py").read_text("utf-8"))
    (beside,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "BESIDE"
    )
    found = 0
    for page in (*map(ROOT.joinpath, beside.values()), *ROOT.glob("docs/*.md")):
        linked = [name for name, _ in LINK.findall(text_of(page))]
        linked += re.findall(r'(?:src|href|srcset)="(?!https?:)([^"#]+)"', text_of(page))
        for name in filter(None, linked):
            found += 1
            place = (page.parent / name).resolve().relative_to(ROOT).as_posix()
            if page.parent == ROOT:
                assert place.startswith("docs/") or place in beside.values(), f"{page.name}: {name}"
            else:
                assert place.startswith("docs/"), f"{page.name}: {name}"
    assert found > 50
