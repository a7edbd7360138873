"""The classes that variants are made of: those that a package's files define, and a user's.

An exported model carries another file in this one's place, which names only what it needs.
"""

import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Iterator

from wakeful.errors import WakefulError

CONSENT = "WAKEFUL_IMPORT"
"""The environment variable that lists modules, by commas, which a run or an export may name."""


def classes(folder: str) -> Iterator[type]:
    """Yield every class of the package `wakeful.folder`: its own, then its files' by their names.

    A folder inside another is written with a dot ("optim.rotations").
    """
    package = importlib.import_module(f"wakeful.{folder}")
    files = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    modules = (importlib.import_module(f"{package.__name__}.{file}") for file in files)
    for module in (package, *modules):
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__:
                yield value


def foreign(name: str, *, imports: bool) -> object:
    """Return the object `module:Name` of a module outside the package; None if it has no such name.

    A module that nobody has imported yet is imported where `imports` says so, for a name that the
    user wrote, or where the environment names it.

    Raises:
        WakefulError: the module is not to be imported, or cannot be.
    """
    module_name, _, attribute = name.partition(":")
    module = sys.modules.get(module_name)
    if module is None:
        if not imports and module_name not in os.environ.get(CONSENT, "").split(","):
            raise WakefulError(
                f"{name} is not part of wakeful, and no module is imported because a file names "
                f"it; if you trust it, import {module_name} first or set {CONSENT}={module_name}"
            )
        module = _imported(module_name, name)
    return vars(module).get(attribute)


def qualified(kind: type) -> str:
    """Return `module:Name` of a class from outside the package, and "" for one of ours."""
    inside = kind.__module__.split(".")[0] == __name__.split(".")[0]
    return "" if inside else f"{kind.__module__}:{kind.__qualname__}"


def _imported(module_name: str, name: str) -> object:
    # The console script, unlike `python -m`, leaves the working directory out of the path.
    here = os.getcwd()
    added = here not in sys.path and "" not in sys.path
    if added:
        sys.path.append(here)
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        raise WakefulError(
            f"{name}: the module {module_name} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    finally:
        if added:
            sys.path.remove(here)
