"""A hook of MkDocs: the pages of the site that no file of docs/ holds.

README and the other pages beside it are taken over with their links, and every public name of every
room becomes a part of the reference: what a room's `__all__` lists, read from the source, so that
nothing is imported and a new name needs no line here.
"""

import ast
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "wakeful"
BESIDE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
    "CITATION.cff": "CITATION.cff",
}
"""Files of the site by the file beside docs/ that they are."""
NOT_SHOWN = ("__version__",)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages of the reference where the navigation names their folder."""
    config.nav = [
        {title: [f"reference/{room}.md" for room in rooms()]} if place == "reference/" else each
        for each in config.nav or []
        for title, place in each.items()
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages."""
    for page, name in BESIDE.items():
        text = (ROOT / name).read_text("utf-8").replace("](docs/", "](").replace('="docs/', '="')
        for other, theirs in BESIDE.items():
            text = text.replace(f"]({theirs}", f"]({other}")
        files.append(File.generated(config, page, content=text))
    for room, (summary, names) in rooms().items():
        parts = [f"# {room}", summary, *(_entry(f"{room}.{name}") for name in names)]
        content = "\n\n".join(parts) + "\n"
        files.append(File.generated(config, f"reference/{room}.md", content=content))
    return files


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
    read(PACKAGE.with_name("wakeful_papers") / "__init__.py", found)
    return whole | found


def read(file: Path, found: dict[str, Any]) -> None:
    tree = ast.parse(file.read_text("utf-8"))
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names = [name for name in ast.literal_eval(node.value) if name not in NOT_SHOWN]
            room = ".".join(file.parent.relative_to(PACKAGE.parent).parts)
            summary = (ast.get_docstring(tree) or "").split("\n\n")[0]
            found[room] = (summary, sorted(names, key=str.lower))
