"""The house has floors: a package imports from those below it, never from those above."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "wakeful"

FLOORS = (
    ("errors", "shape", "paths", "digests", "estimates", "roles", "lazy", "hub"),
    ("discovery", "plain_text"),
    ("display", "variants", "world", "families", "implementations"),
    ("config", "device"),
    (
        "routes",
        "depth",
        "normalizers",
        "norms",
        "placements",
        "ropes",
        "embeddings",
        "optim",
        "data",
    ),
    ("model",),
    ("probes",),
    ("quant",),
    ("surgery", "runs"),
    ("hf",),
    ("loading",),
    ("training",),
    ("evaluation", "growth"),
    ("comparison",),
    ("exhibits",),
    ("pages",),
    ("verbs",),
    ("cli",),
    ("__main__",),
)
"""From the ground up. A room imports from lower floors, and from itself."""
FLOOR = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}


def imports(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the full name of everything of ours that a file imports.

    Imports inside functions and under TYPE_CHECKING count as well.
    """
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: imports name their module in full"
            module = node.module or ""
            for alias in node.names:
                yield node.lineno, f"{module}.{alias.name}"


def room_of(file: Path) -> str:
    return file.relative_to(SOURCE).with_suffix("").parts[0]


def uphill(file: Path) -> list[str]:
    """Return the imports of a file that lead to its own floor's neighbors or to a floor above."""
    here = room_of(file)
    if here == "__init__":
        return []
    found = []
    for line, name in imports(file):
        parts = name.split(".")
        if parts[0] != "wakeful" or len(parts) < 2 or parts[1] in (here, "__version__"):
            continue
        there = parts[1]
        if there not in FLOOR or FLOOR[there] >= FLOOR[here]:
            found.append(f"{file.relative_to(SOURCE)}:{line} imports {name}")
    return found


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(file) for file in SOURCE.rglob("*.py")} - {"__init__"}
    assert rooms == set(FLOOR)


def test_imports_lead_down() -> None:
    assert [line for file in sorted(SOURCE.rglob("*.py")) for line in uphill(file)] == []


def test_modules_of_a_room_form_no_ring() -> None:
    files = {
        ".".join(("wakeful", *file.relative_to(SOURCE).with_suffix("").parts)): file
        for file in SOURCE.rglob("*.py")
        if file.name != "__init__.py"
    }
    below = {
        module: {
            target
            for _, name in imports(file)
            for target in (name, name.rpartition(".")[0])
            if target in files and target != module
        }
        for module, file in files.items()
    }
    done: set[str] = set()

    def descend(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for target in sorted(below[module]):
                descend(target, (*path, module))
            done.add(module)

    for module in files:
        descend(module, ())


@pytest.mark.parametrize(
    "statement",
    ["import wakeful.cli", "from wakeful.pages import charts", "from wakeful import verbs"],
)
@pytest.mark.parametrize("place", ["{}", "def f():\n    {}", "if TYPE_CHECKING:\n    {}"])
def test_an_import_that_leads_up_is_found(
    statement: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path)
    file = tmp_path / "quant" / "grids.py"
    file.parent.mkdir()
    file.write_text(place.format(statement))
    assert len(uphill(file)) == 1
