"""Layouts: sections that installed packages add to a comparison's page, such as a paper's table."""

from collections import ChainMap
from collections.abc import Callable, Sequence

from wakeful.errors import WakefulError, did_you_mean
from wakeful.reports.value import Section
from wakeful.training.compared import ComparedRuns
from wakeful.variants.plugins import group_entry_points

Layout = Callable[[ComparedRuns], Sequence[Section]]
"""A layout, by its name in a package's mapping `wakeful.layouts` (`plugins`)."""


def layout_of(name: str) -> Layout:
    """Return the layout of this name: a function from a comparison to further sections of its page.

    Raises:
        WakefulError: no installed package has a layout of this name.
    """
    # Each entry point is a package's mapping from names to layouts.
    installed = ChainMap(*(point.load() for point in group_entry_points("layouts").values()))
    if name not in installed:
        raise WakefulError(f"layouts: no layout {name[:80]!r}{did_you_mean(name, installed)}")
    return installed[name]
