"""Discovery of the classes of variants: those in the files of a package, and a user's.

Classes from outside the package are kept in one table. A file that was read (a run, a recipe, a
model's configuration) can name only classes in it. An exported model has another file in place of
this one, which lists only the classes that it needs.
"""

import contextlib
import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from types import ModuleType

from wakeful.errors import WakefulError

CONSENT = "WAKEFUL_IMPORT"
"""The environment variable with the modules or files, separated by commas, that a run or an export
may name; `--import` adds to it for one command."""


class NotTrusted(WakefulError):
    """A file names a module outside the package that the user did not allow with `--import`."""

    def __init__(self, name: str) -> None:
        """Build the message: a file names the object `name` (`module:Name`)."""
        module = name.partition(":")[0]
        super().__init__(
            f"{name} is not part of wakeful, and no module is imported because a file names it; if "
            f"you trust it, add --import {module}, or its file's path (in Python: import {module} "
            f"first, or set {CONSENT})"
        )


_OUTSIDE: dict[str, object] = {}
"""Variants and other objects from outside the package, by `module:Name`: those that a file may
name. A module that was imported for another purpose adds nothing: `os:system` is not there."""


def package_classes(folder: str) -> Iterator[type]:
    """Yield every class that the package `wakeful.folder` defines: in `__init__`, then in its files
    in the order of their names.

    A folder inside another is written with a dot ("optim.rotations").
    """
    package = importlib.import_module(f"wakeful.{folder}")
    files = sorted(info.name for info in pkgutil.iter_modules(package.__path__))
    modules = (importlib.import_module(f"{package.__name__}.{file}") for file in files)
    for module in (package, *modules):
        for value in vars(module).values():
            if inspect.isclass(value) and value.__module__ == module.__name__:
                yield value


def register_external_class(kind: type) -> None:
    """Add a class from outside the package to the table of those that files may name."""
    if name := qualified_name(kind):  # "" for a class of the package
        _OUTSIDE[name] = kind


def external_object(name: str, *, imports: bool) -> object:
    """Return the object that is called `name` (`module:Name`) outside the package; None if the
    module does not have it.

    The module is imported, if it is not yet, in two cases: the user wrote the name (`imports`), or
    allowed the module in the environment variable `CONSENT`. The object is then added to the table
    of those that files may name. In all other cases the name must be in that table: a variant's
    class is, once the user has imported its module.

    Raises:
        NotTrusted: the module must not be imported, and the name is not in the table.
        WakefulError: the module cannot be imported.
    """
    module_name, _, attribute = name.partition(":")
    entry = consent_entry(module_name)
    if imports or entry:
        module = sys.modules.get(module_name) or _import_module(module_name, name, entry)
        _OUTSIDE[name] = vars(module).get(attribute)
    # A module whose import failed halfway is not in sys.modules, but its classes are in the table.
    if name not in _OUTSIDE or module_name not in sys.modules:
        raise NotTrusted(name)
    return _OUTSIDE[name]


def consent_entry(module: str) -> str:
    """Return the entry of the environment variable `CONSENT` that allows importing a module; "" if
    none does.

    An entry is the module's name, or a path that ends in the module's file: in a/b.py or
    a/b/__init__.py for the module "a.b".
    """
    path = PurePosixPath(*module.split("."))
    # For "a.b": ("a", "b.py") and ("a", "b", "__init__.py").
    module_files = (path.with_suffix(".py").parts, (*path.parts, "__init__.py"))
    entries = filter(None, os.environ.get(CONSENT, "").split(","))
    for entry in entries:
        parts = Path(entry).absolute().parts
        names_file = any(parts[-len(file) :] == file for file in module_files)
        if entry == module or names_file:
            return entry
    return ""


@contextlib.contextmanager
def trust_modules(entries: Sequence[str]) -> Iterator[None]:
    """Allow files to name these modules, each given by name or path, inside the context.

    The environment variable `CONSENT` is extended, so that child processes allow them too, and set
    back at the end.

    Raises:
        WakefulError: there is no such file, or its name has a comma.
    """
    for entry in entries:
        if entry.endswith(".py") and not os.path.isfile(entry):
            raise WakefulError(f"--import {entry}: there is no such file")
        if "," in entry or not entry:
            raise WakefulError(f"--import {entry!r}: name a module or a file, without a comma")
    previous = os.environ.get(CONSENT)
    if entries:
        os.environ[CONSENT] = ",".join(filter(None, [previous, *entries]))
    try:
        yield
    finally:
        if entries:
            if previous is None:
                os.environ.pop(CONSENT)
            else:
                os.environ[CONSENT] = previous


def qualified_name(kind: type) -> str:
    """Return `module:Name` of a class from outside the package; "" for a class of wakeful."""
    is_inside = kind.__module__.split(".")[0] == __name__.split(".")[0]
    return "" if is_inside else f"{kind.__module__}:{kind.__qualname__}"


def _import_module(module_name: str, name: str, entry: str) -> ModuleType:
    """Import a module and return it: from the file `entry` if that is a path, else from where
    Python finds it, the working directory included.

    During the import `sys.path` has one more folder. `name` (`module:Name`) is for the error
    message.

    Raises:
        WakefulError: importing fails, by whatever error.
    """
    if entry.endswith(".py"):
        file = Path(entry).resolve()
        # The folder from which the module's dotted name starts: Python looks there first.
        levels_up = module_name.count(".") + (file.name == "__init__.py")
        added_folder = str(file.parents[levels_up])
        sys.path.insert(0, added_folder)
    else:
        # The console script, unlike `python -m`, leaves the working directory out of the path.
        added_folder = "" if "" in sys.path or os.getcwd() in sys.path else os.getcwd()
        if added_folder:
            sys.path.append(added_folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise WakefulError(
            f"{name}: the module {module_name} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    finally:
        if added_folder:
            sys.path.remove(added_folder)
    return module
