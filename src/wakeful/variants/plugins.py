"""Verbs of the command line, and entry points by which installed packages extend wakeful.

wakeful.verbs     a `Verb`, by the verb's name
wakeful.layouts   a mapping of names to `training.layouts.Layout`s
wakeful.presets   a package whose TOML files are presets
"""

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
    """A verb of the command line."""

    summary: str
    """One sentence for the overview and the top of its help."""
    usage: str
    """Its names after the verb, such as "MODEL..." or "[PRESET]"; "" for none."""
    options: type
    """Dataclass of its options."""
    run: Callable[[list[str]], None]
    """Takes the arguments after the verb."""
    examples: Sequence[tuple[str, str]] = ()
    """Commands and the effect of each."""
    argument_help: Mapping[str, str] = field(default_factory=dict)
    """Meaning of each name in `usage`, such as {"MODEL": "a folder or a name"}."""
    names: Callable[[], Iterable[str]] = tuple
    """Possible names, listed at the end of its help."""
    report: Callable[..., Any] | None = None
    """Writes the page of run directories of the verb's kind, called as `wakeful.report`."""


@cache
def group_entry_points(group: str) -> Mapping[str, EntryPoint]:
    """Return the entry points of `wakeful.GROUP` by their names."""
    return {point.name: point for point in entry_points(group=f"wakeful.{group}")}


def load_plugin_verb(name: str) -> Verb | None:
    """Return the verb that an installed package adds under this name; None if no package does."""
    entry_point = group_entry_points("verbs").get(name)
    return entry_point.load() if entry_point else None


def preset_folders() -> list[Path]:
    """Return the folders of presets that installed packages add by entry points.

    If such a folder is inside a package, finding it imports that package.
    """
    folders: list[Path] = []
    for entry_point in group_entry_points("presets").values():
        spec = importlib.util.find_spec(entry_point.module)
        if spec is not None:  # None if the folder does not exist
            folders += map(Path, spec.submodule_search_locations or ())
    return folders


def import_optional(
    package: str, *, extra: str, wants: str, module: str = "", otherwise: str = ""
) -> Any:
    """Import a module of an optional package, which `pip install wakeful[extra]` installs, and
    return it.

    `module` is the module's name, by default the package's with underscores. `wants` (what needs
    the package) begins the error message, and `otherwise` (an alternative) ends it.

    Raises:
        WakefulError: the package is not installed.
    """
    try:
        return importlib.import_module(module or package.replace("-", "_"))
    except ImportError:
        raise WakefulError(
            f"{wants} needs the package {package}: pip install 'wakeful[{extra}]'{otherwise}"
        ) from None
