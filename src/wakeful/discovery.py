"""The classes that the files of a folder define."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator


def classes(folder: str) -> Iterator[type]:
    """Yield every class that a file of `wakeful.folder` defines, in the order of the files' names.

    An exported model carries another file in this one's place, which names only what it needs.
    """
    package = importlib.import_module(f"wakeful.{folder}")
    for module_info in sorted(pkgutil.iter_modules(package.__path__), key=lambda info: info.name):
        module = importlib.import_module(f"{package.__name__}.{module_info.name}")
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__:
                yield value
