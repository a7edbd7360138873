"""Build the pages as a site that opens without a server: `make docs`.

The generator sees a folder of its own, in which docs/ and README and the other pages beside it
stand with their links, and a page for every room: every public name, as its
`__all__` lists it, read from the source, so that a new name needs no line here. What it has built
must fetch nothing and lead nowhere that is not there: links, pictures and headings are followed.
"""

import ast
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "wakeful"
BUILD = ROOT / "build"
BESIDE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "CITATION.cff": "CITATION.cff",
}
"""Files of the site by the file beside docs/ that they are."""
PAPERS = ROOT / "papers"
NOT_SHOWN = ("__version__",)
FETCHED = re.compile(r'<script src="https://[^"]*"[^>]*></script>')
"""What the generator's search would load of others' machines; our own script stands in for it."""


def main() -> int:
    """Build the site into build/docs; return 1 where the generator or a link fails."""
    stage(BUILD / "pages")
    shutil.rmtree(BUILD / "docs", ignore_errors=True)
    command = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    if subprocess.run([*command, "--config-file", str(settings())], check=False).returncode:
        return 1
    for page in (BUILD / "docs").rglob("*.html"):
        page.write_text(FETCHED.sub("", page.read_text("utf-8")), "utf-8")
    broken = list(problems(BUILD / "docs"))
    print(*broken, sep="\n", end="\n" * bool(broken), file=sys.stderr)
    return 1 if broken else 0


def stage(folder: Path) -> None:
    """Write the generator's folder."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(ROOT / "docs", folder)
    shutil.copytree(PAPERS / "docs", folder / "papers")
    moved = [
        ("*.md", "](../papers/docs/", "](papers/"),
        ("archive/*.md", "](../../papers/docs/", "](../papers/"),
        ("papers/*.md", "](../../docs/", "](../"),
        *(("*.md", f"](../{name}", f"]({page}") for page, name in BESIDE.items()),
    ]
    for path, other, place in moved:
        for file in folder.glob(path):
            file.write_text(file.read_text("utf-8").replace(other, place), "utf-8")
    for page, name in BESIDE.items():
        text = (ROOT / name).read_text("utf-8").replace("](docs/", "](").replace('="docs/', '="')
        text = text.replace("](papers/docs/", "](papers/")
        for other, theirs in BESIDE.items():
            text = text.replace(f"]({theirs}", f"]({other}")
        (folder / page).write_text(text, "utf-8")
    (folder / "reference").mkdir()
    for room, (summary, names) in rooms().items():
        parts = [f"# {room}", summary, *(_entry(f"{room}.{name}") for name in names)]
        (folder / "reference" / f"{room}.md").write_text("\n\n".join(parts) + "\n", "utf-8")


def settings() -> Path:
    """Write the generator's settings, with every room in the place of the reference's folder."""
    pages = "".join(f"      - reference/{room}.md\n" for room in rooms())
    text = (ROOT / "mkdocs.yml").read_text("utf-8")
    for old, new in {
        "  - Reference: reference/\n": f"  - Reference:\n{pages}",
        "docs_dir: docs\n": "docs_dir: pages\n",
        "site_dir: build/docs\n": "site_dir: docs\n",
        "paths: [src, papers/src]\n": "paths: [../src, ../papers/src]\n",
        "[tools/overloads.py]": f"[{ROOT}/tools/overloads.py]",
    }.items():
        assert text.count(old) == 1, f"mkdocs.yml has no line {old!r}"
        text = text.replace(old, new)
    place = BUILD / "mkdocs.yml"
    place.write_text(text, "utf-8")
    return place


def _entry(name: str) -> str:
    """Return what mkdocstrings replaces by a name's description."""
    # Options that several verbs share are fields of a base that has no entry.
    more = "\n    options: {inherited_members: true, show_bases: false}"
    return f"::: {name}" + more * name.endswith(("Config", "Options"))


def rooms() -> dict[str, tuple[str, list[str]]]:
    """Return every package with public names: its first sentence, and the names."""
    found: dict[str, tuple[str, list[str]]] = {}
    for file in sorted(PACKAGE.glob("*/__init__.py"), key=lambda file: file.parent.name):
        read(file, found)
    whole: dict[str, tuple[str, list[str]]] = {}
    read(PACKAGE / "__init__.py", whole)
    read(PAPERS / "src" / "wakeful_papers" / "__init__.py", found)
    return whole | found


def read(file: Path, found: dict[str, Any]) -> None:
    """Note a package's public names, where it lists any."""
    tree = ast.parse(file.read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = [name for name in ast.literal_eval(node.value) if name not in NOT_SHOWN]
            source = PACKAGE.parent if file.is_relative_to(PACKAGE) else PAPERS / "src"
            room = ".".join(file.parent.relative_to(source).parts)
            summary = (ast.get_docstring(tree) or "").split("\n\n")[0]
            found[room] = (summary, sorted(names, key=str.lower))


class Page(HTMLParser):
    """A page's anchors, what it links to or loads, and whether a formula became emphasis."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.has_garbled_formula = False
        self.feed(path.read_text("utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value}
        self.anchors |= {given[name] for name in ("id", "name") if name in given}
        self.has_garbled_formula |= tag == "em" and bool(attrs)
        if tag == "a" and "href" in given:
            self.links.add(given["href"])
        elif tag != "a":
            self.loads |= {given[name] for name in ("href", "src", "srcset") if name in given}


def problems(site: Path) -> list[str]:
    """Return a line for each broken link, load from elsewhere and formula read as emphasis."""
    pages = {path.resolve(): Page(path) for path in sorted(site.rglob("*.html"))}
    found = [
        f"{path.relative_to(site)}: {name} is public, and its page has no entry"
        for path, page in pages.items()
        if path.parent.name == "reference" and path.name != "index.html"
        for name in _expected(path.stem) - page.anchors
    ]
    for path, page in pages.items():
        if path.name == "404.html":
            continue  # its links begin at a server's root
        if page.has_garbled_formula:  # _n = λ_{n,1}: emphasis with attributes
            found.append(f"{path.relative_to(site)}: a formula reads as emphasis: put it in `...`")
        for link in sorted(page.links | page.loads):
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                if link in page.loads and parts.scheme != "data":
                    found.append(f"{path.relative_to(site)}: loads {link}")
                continue
            place = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            place = place / "index.html" if place.is_dir() else place
            if not place.is_file():
                found.append(f"{path.relative_to(site)}: {link} does not exist")
            elif parts.fragment and place in pages:
                anchor = unquote(parts.fragment)
                if anchor not in pages[place].anchors and not anchor.startswith("__"):
                    found.append(f"{path.relative_to(site)}: {link} is no heading")
    return found


def _expected(room: str) -> set[str]:
    """Return the anchors that a room's page must have."""
    return {f"{room}.{name}" for name in rooms()[room][1]}


if __name__ == "__main__":
    sys.exit(main())
