"""Public names that are imported when they are first asked for (PEP 562)."""

import ast
import importlib
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def lazily(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return a package's `__getattr__` and `__dir__` for the names that its source imports for type
    checkers alone: what stands below its `if TYPE_CHECKING`.

    A name is kept once it is found, so it costs a lookup from then on. It must not be a submodule's
    too: the import system would put that in its place.
    """

    @cache
    def homes() -> dict[str, str]:
        source = Path(sys.modules[package].__file__ or "").read_text("utf-8")
        block = next(node for node in ast.parse(source).body if isinstance(node, ast.If))
        imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
        return {alias.name: str(node.module) for node in imports for alias in node.names}

    def find(name: str) -> Any:
        if name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(homes()[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes()})

    return find, names
