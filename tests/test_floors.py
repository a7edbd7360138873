"""The house has floors: a package imports from those below it, never from those above."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src"

FLOORS = (
    (
        "version",
        "errors",
        "shape",
        "paths",
        "digests",
        "estimates",
        "roles",
        "lazy",
        "hub",
        "finding",
    ),
    ("discovery", "plugins", "plain_text"),
    ("display", "variants", "world", "families", "implementations", "paged"),
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
    ("evaluation", "heirs"),
    ("comparison",),
    ("reports",),
    ("verbs",),
    ("__init__",),
    ("cli",),
    ("__main__",),
)
"""From the ground up. A room imports from lower floors, and from itself; `__init__` is the face."""
PAPERS = (("options", "exhibits"), ("reports",), ("verbs",), ("__init__",), ("cli",))
"""The house on top: its rooms import from all of the other as well, which knows nothing of them."""
HOUSES = {"wakeful": FLOORS, "wakeful_papers": PAPERS}
FLOOR = {
    (house, room): height
    for number, (house, floors) in enumerate(HOUSES.items())
    for height, rooms in enumerate(floors, start=1000 * number)
    for room in rooms
}


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


def place_of(file: Path) -> tuple[str, str]:
    """Return a file's house and its room there."""
    house, room, *_ = file.relative_to(SOURCE).with_suffix("").parts
    return house, room


def target_of(name: str) -> tuple[str, str]:
    """Return the house and the room of what is imported; a name that is no room's is the face's."""
    house, room, *_ = *name.split("."), ""
    return house, room if (house, room) in FLOOR else "__init__"


def uphill(file: Path) -> list[str]:
    """Return the imports of a file that lead to its own floor's neighbors or to a floor above."""
    here = place_of(file)
    found = []
    for line, name in imports(file):
        there = target_of(name)
        if there[0] not in HOUSES or there == here:
            continue
        if FLOOR[there] >= FLOOR[here]:
            found.append(f"{file.relative_to(SOURCE)}:{line} imports {name}")
    return found


def files() -> list[Path]:
    return [file for house in HOUSES for file in sorted((SOURCE / house).rglob("*.py"))]


def test_every_room_has_a_floor() -> None:
    assert {place_of(file) for file in files()} == set(FLOOR)


def test_imports_lead_down() -> None:
    assert [line for file in files() for line in uphill(file)] == []


def test_modules_of_a_room_form_no_ring() -> None:
    modules = {
        ".".join(file.relative_to(SOURCE).with_suffix("").parts): file
        for file in files()
        if file.name != "__init__.py"
    }
    below = {
        module: {
            target
            for _, name in imports(file)
            for target in (name, name.rpartition(".")[0])
            if target in modules and target != module
        }
        for module, file in modules.items()
    }
    done: set[str] = set()

    def descend(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path[path.index(module) :], module))
        if module not in done:
            for target in sorted(below[module]):
                descend(target, (*path, module))
            done.add(module)

    for module in modules:
        descend(module, ())


@pytest.mark.parametrize(
    "statement",
    [
        "import wakeful.cli",
        "from wakeful.reports import charts",
        "from wakeful import verbs",
        "import wakeful",
        "from wakeful import __version__",
        "import wakeful_papers",
        "from wakeful_papers.exhibits import exhibit",
    ],
)
@pytest.mark.parametrize("place", ["{}", "def f():\n    {}", "if TYPE_CHECKING:\n    {}"])
def test_an_import_that_leads_up_is_found(
    statement: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.SOURCE", tmp_path)
    file = tmp_path / "wakeful" / "quant" / "grids.py"
    file.parent.mkdir(parents=True)
    file.write_text(place.format(statement))
    assert len(uphill(file)) == 1
