"""The scripts of tools/, which are no package, as modules."""

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]


def tool_of(name: str, folder: str = "tools") -> ModuleType:
    """Return the script `FOLDER/NAME.py` of the repository as a module of its own."""
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
