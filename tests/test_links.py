"""Links between the pages lead to files and headings that there are."""

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
