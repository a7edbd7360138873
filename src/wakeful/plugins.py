"""Other packages: what they add to this one by their entry points, and those that may be missing.

    wakeful.verbs     a `Verb`, by the verb's name
    wakeful.layouts   a mapping of names to `reports.layouts.Layout`s
    wakeful.presets   a package whose TOML files are presets

What there is stands in metadata, and what it is about in files: a package is imported once
something of it is used.
"""

import ast
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from wakeful.errors import WakefulError


@dataclass(frozen=True, kw_only=True)
class Verb:
    """A verb of the command line. The first line of its module's docstring is its summary."""

    run: Callable[[list[str]], None]
    """Takes the arguments after its name."""
    options: type
    examples: Sequence[tuple[str, str]]
    """Commands and what each does."""
    words: Mapping[str, str] = field(default_factory=dict)
    """Meanings of the words of its usage line."""
    names: Callable[[], Iterable[str]] = tuple
    """Its possible arguments, for completion."""
    report: Callable[..., Any] | None = None
    """Writes the page of run directories of the verb's kind, called as `verbs.report.report`."""


@cache
def added(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of `wakeful.GROUP` by their names."""
    return {point.name: point for point in entry_points(group=f"wakeful.{group}")}


def verb_of(name: str) -> Verb | None:
    """Return a verb that an installed package adds, if one adds any of that name."""
    point = added("verbs").get(name)
    return point.load() if point else None


def source_of(point: EntryPoint) -> Path:
    """Return where the module or package of an entry point lies, without importing it."""
    top, *inner = point.module.split(".")
    found = importlib.util.find_spec(top)
    folders = (found.submodule_search_locations if found else None) or [top]
    path = Path(folders[0], *inner)
    return path if path.is_dir() else path.with_suffix(".py")


def summary_of(point: EntryPoint) -> str:
    """Return the first line of what an entry point's module says of itself."""
    words = ast.get_docstring(ast.parse(source_of(point).read_text("utf-8")))
    return (words or "").partition("\n")[0]


def optional(package: str, *, extra: str, wants: str, module: str = "", otherwise: str = "") -> Any:
    """Return the module of a package that only an extra of wakeful's installs.

    Raises:
        WakefulError: it is missing; `wants` needs it, and `otherwise` goes on from the command that
            installs it.
    """
    try:
        return importlib.import_module(module or package.replace("-", "_"))
    except ImportError:
        raise WakefulError(
            f"{wants} needs the package {package}: pip install 'wakeful[{extra}]'{otherwise}"
        ) from None
