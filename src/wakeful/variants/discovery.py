"""The classes that variants are made of: those that a package's files define, and a user's.

What a user's own modules add is kept in one table, which is all that a file that was read (a run,
a recipe, a model's configuration) can choose from. An exported model carries another file in this
one's place, which names only what it needs.
"""

import contextlib
import importlib
import inspect
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from types import ModuleType

from wakeful.errors import WakefulError

CONSENT = "WAKEFUL_IMPORT"
"""The environment variable that lists modules or their files, by commas, which a run or an export
may name; `--import` adds to it for one command."""


class NotTrusted(WakefulError):
    """A file names a module of a user's, and the user has not said that it may be imported."""

    def __init__(self, name: str, folder: str = "", files: Mapping[str, str] | None = None) -> None:
        module = name.partition(":")[0]
        files = files or {}
        flags = [
            path or own for own, path in {module: "", **files}.items() if not consent_entry(own)
        ]
        location = f" ({files[module]})" if files.get(module) else ""
        super().__init__(
            f"{name}{location} is not part of wakeful, and no module is imported because "
            f"{folder or 'a file'} names it; if you trust it, add --import {' '.join(flags)} (in "
            f"Python: import {module} first, or set {CONSENT})"
        )
        self.name = name


_OUTSIDE: dict[str, object] = {}
"""Objects from outside the package, by `module:Name`. A module that was imported for another
purpose adds nothing to it: `os:system` in a file is a name that is not there."""


def package_classes(folder: str) -> Iterator[type]:
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


def register_external_class(kind: type) -> None:
    """Add a class from outside the package to the table, by its module and name."""
    if name := qualified_name(kind):
        _OUTSIDE[name] = kind


def external_object(name: str, *, imports: bool) -> object:
    """Return the object `module:Name` from outside the package; None if there is no such name.

    A name that the user wrote (`imports`), or whose module the user trusts, is added to the table,
    and its module imported. Any other name must be in the table.

    Raises:
        NotTrusted: the name is not in the table and not to be added.
        WakefulError: its module cannot be imported.
    """
    module_name, _, attribute = name.partition(":")
    entry = consent_entry(module_name)
    if imports or entry:
        module = sys.modules.get(module_name) or _import_module(module_name, name, entry)
        _OUTSIDE[name] = vars(module).get(attribute)
    if name not in _OUTSIDE or module_name not in sys.modules:
        raise NotTrusted(name)
    return _OUTSIDE[name]


def consent_entry(module: str) -> str:
    """Return the entry of `CONSENT` that names a module, by its name or its file; "" for none."""
    path = PurePosixPath(*module.split("."))
    files = (path.with_suffix(".py").parts, (*path.parts, "__init__.py"))
    entries = filter(None, os.environ.get(CONSENT, "").split(","))
    for entry in entries:
        parts = Path(entry).absolute().parts
        if entry == module or any(parts[-len(file) :] == file for file in files):
            return entry
    return ""


@contextlib.contextmanager
def trust_modules(entries: Sequence[str]) -> Iterator[None]:
    """Let files name these modules, given by name or by file, until the context ends.

    Raises:
        WakefulError: there is no such file, or its name has a comma.
    """
    for entry in entries:
        if entry.endswith(".py") and not os.path.isfile(entry):
            raise WakefulError(f"--import {entry}: there is no such file")
        if "," in entry or not entry:
            raise WakefulError(f"--import {entry!r}: name a module or a file, without a comma")
    before = os.environ.get(CONSENT)
    if entries:
        os.environ[CONSENT] = ",".join(filter(None, [before, *entries]))
    try:
        yield
    finally:
        if entries:
            os.environ.pop(CONSENT)
            os.environ.update({} if before is None else {CONSENT: before})


@contextlib.contextmanager
def suggest_files(folder: object, files: Mapping[str, str]) -> Iterator[None]:
    """Let the refusal of a module that a folder names list all the `files` that it remembers."""
    try:
        yield
    except NotTrusted as error:
        raise NotTrusted(error.name, str(folder), files) from None


def module_files(names: Iterable[str]) -> dict[str, str]:
    """Return the file of each imported module that a `module:Name` names, by the module's name."""
    modules = {name: sys.modules.get(name) for name in (entry.partition(":")[0] for entry in names)}
    files = {name: getattr(module, "__file__", None) for name, module in modules.items()}
    return {name: os.path.abspath(file) for name, file in files.items() if file}


def qualified_name(kind: type) -> str:
    """Return `module:Name` of a class from outside the package, and "" for one of ours."""
    inside = kind.__module__.split(".")[0] == __name__.split(".")[0]
    return "" if inside else f"{kind.__module__}:{kind.__qualname__}"


def _import_module(module_name: str, name: str, entry: str) -> ModuleType:
    """Import a module that the user allowed by `entry`: from that file, if it is a path of one,
    else as Python finds it, also in the working directory. `name` is for the error message.
    """
    # The console script, unlike `python -m`, leaves the working directory out of the path.
    folder = os.getcwd()
    added = folder not in sys.path and "" not in sys.path
    file = Path(entry).resolve() if entry.endswith(".py") else None
    if file is not None:
        up = module_name.count(".") + (file.name == "__init__.py")
        folder, added = str(file.parents[up]), True
        sys.path.insert(0, folder)
    elif added:
        sys.path.append(folder)
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise WakefulError(
            f"{name}: the module {module_name} cannot be imported ({type(error).__name__}: {error})"
        ) from error
    finally:
        if added:
            sys.path.remove(folder)
    return module
