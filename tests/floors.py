"""Packages in layers: a package imports from lower floors, never from its neighbors or above."""

import ast
import graphlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class House:
    """A package, its rooms and the packages on top of it."""

    folder: Path
    floors: Sequence[Sequence[str]]
    """From the ground up. A room imports from lower floors, and from itself; `__init__` is the
    package's own module."""
    above: Sequence[str] = ()
    """Packages that it must not import at all."""
    entries: Mapping[str, str] = field(default_factory=dict)
    """Modules that count as part of another room."""
    tools: Sequence[str] = ()
    """Rooms of one floor that may import from each other what their `__init__` exports, without a
    ring between them."""

    @property
    def files(self) -> list[Path]:
        return sorted(self.folder.rglob("*.py"))

    @property
    def heights(self) -> dict[str, int]:
        return {room: height for height, rooms in enumerate(self.floors) for room in rooms}

    def room_of(self, file: Path) -> str:
        room = file.relative_to(self.folder).with_suffix("").parts[0]
        return self.entries.get(room, room)

    def target_of(self, name: str) -> str | None:
        """Return the room of an imported name, or None for another package's."""
        package, room, *_ = *name.split("."), ""
        if package != self.folder.name:
            return None
        return room if room in self.heights else "__init__"

    def upward_imports(self, file: Path) -> list[str]:
        """Return the imports of a file that lead to a neighbor on its floor or to a floor above."""
        heights, room = self.heights, self.room_of(file)
        wrong = []
        for line, name in imports(file):
            target = self.target_of(name)
            if self.is_export(room, target, name):
                continue
            upward = target not in (None, room) and heights[str(target)] >= heights[room]
            if upward or name.split(".")[0] in self.above:
                wrong.append(f"{file.relative_to(self.folder)}:{line} imports {name}")
        return wrong

    def is_export(self, room: str, target: str | None, name: str) -> bool:
        """Tell whether a tool imports a name that another tool exports."""
        if not {room, target} <= {*self.tools} or room == target:
            return False
        parts = name.split(".")
        return len(parts) == 3 and parts[2] in exports(self.folder / parts[1] / "__init__.py")

    def check_tools(self) -> None:
        """Assert that no tools import from each other in a ring."""
        below: dict[str, set[str]] = {tool: set() for tool in self.tools}
        for file in self.files:
            room = self.room_of(file)
            targets = {self.target_of(name) for _, name in imports(file)} & {*self.tools}
            if room in below:
                below[room] |= {str(target) for target in targets - {room}}
        graphlib.TopologicalSorter(below).prepare()

    def check(self) -> None:
        """Assert that every room has a floor, imports lead down, and modules form no ring."""
        assert {self.room_of(file) for file in self.files} == set(self.heights)
        assert [line for file in self.files for line in self.upward_imports(file)] == []
        self.check_tools()
        self.check_rings()

    def check_rings(self) -> None:
        source = self.folder.parent
        modules = {
            ".".join(file.relative_to(source).with_suffix("").parts): file
            for file in self.files
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


@cache
def _imports(file: Path, changed: int) -> tuple[tuple[int, str], ...]:
    """Return `imports` of a file, which was last changed at a time."""
    return tuple(_walk_imports(ast.parse(file.read_text("utf-8"))))


def imports(file: Path) -> tuple[tuple[int, str], ...]:
    """Return the line and the full name of everything that a file imports.

    Imports inside functions and under TYPE_CHECKING count as well.
    """
    return _imports(file, file.stat().st_mtime_ns)


def _walk_imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports name their module in full"
            for alias in node.names:
                yield node.lineno, f"{node.module or ''}.{alias.name}"


def exports(file: Path) -> set[str]:
    """Return the names that a package's `__init__` lists in `__all__`."""
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return {*ast.literal_eval(node.value)}
    return set()
