"""Layouts: additions of installed packages to a comparison's page, such as a paper's table."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from wakeful.errors import WakefulError, did_you_mean
from wakeful.reports.value import Section
from wakeful.training.compared import ComparedRuns
from wakeful.variants.plugins import group_entry_points


@dataclass(frozen=True, kw_only=True)
class LayoutParts:
    """Parts that a layout adds to the page of a comparison."""

    verdicts: Sequence[str] = ()
    """Sentences after those about losses."""
    notes: Sequence[str] = ()
    """Caveats about its figures."""
    first: Sequence[Section] = ()
    """Sections right after the verdict."""
    last: Sequence[Section] = ()
    """Sections before the details."""
    method: Sequence[tuple[str, str]] = ()
    """Methods of its figures, by name."""


@runtime_checkable
class Layout(Protocol):
    """A layout, by its name in a package's mapping `wakeful.layouts` (`plugins`)."""

    def parts(self, comparison: ComparedRuns) -> LayoutParts:
        """Return its parts of a comparison's page."""
        ...


def layouts() -> Mapping[str, Layout]:
    """Return every layout of the installed packages, by name."""
    return ChainMap(*(point.load() for point in group_entry_points("layouts").values()))


def layout_of(name: str) -> Layout:
    """Return a layout.

    Raises:
        WakefulError: no installed package has one of that name.
    """
    installed = layouts()
    if name not in installed:
        raise WakefulError(
            f"layouts: no layout {name[:80]!r}{did_you_mean(name, installed)}"
            + ("" if installed else "; no installed package brings any")
        )
    return installed[name]
