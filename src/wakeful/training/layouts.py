"""Layouts: what installed packages add to a comparison's page, such as a table of a paper."""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from wakeful.errors import WakefulError, nearest
from wakeful.reports.value import Section
from wakeful.training.compared import ComparedRuns
from wakeful.variants.plugins import entries


@dataclass(frozen=True, kw_only=True)
class LaidOut:
    """Parts that a layout adds to the page of a comparison."""

    verdicts: Sequence[str] = ()
    """Sentences after those on losses."""
    notes: Sequence[str] = ()
    """Caveat about its figures."""
    first: Sequence[Section] = ()
    """Sections right after the verdict."""
    last: Sequence[Section] = ()
    """Sections before the details."""
    method: Sequence[tuple[str, str]] = ()
    """Methods of its figures, by name."""


@runtime_checkable
class Layout(Protocol):
    """A layout, by its name in a package's mapping `wakeful.layouts` (`plugins`)."""

    def laid_out(self, comparison: ComparedRuns) -> LaidOut:
        """Return what it says of a comparison."""
        ...


def layouts() -> Mapping[str, Layout]:
    """Return every layout of the installed packages, by name."""
    return ChainMap(*(point.load() for point in entries("layouts").values()))


def layout_of(name: str) -> Layout:
    """Return a layout.

    Raises:
        WakefulError: no installed package has one of that name.
    """
    known = layouts()
    if name not in known:
        raise WakefulError(
            f"layouts: no layout {name[:80]!r}{nearest(name, known)}"
            + ("" if known else "; no installed package brings any")
        )
    return known[name]
