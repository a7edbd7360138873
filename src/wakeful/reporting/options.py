"""Options of `report`."""

from dataclasses import dataclass

from wakeful.config.options import What, Where
from wakeful.config.reading import FigureOptions


@dataclass(frozen=True, kw_only=True)
class ReportOptions(FigureOptions):
    """Destination and title of a report."""

    out: Where[str] = ""
    """HTML file to write. Empty: report.html in the first folder."""
    baseline: What[str] = ""
    """Variant that the others are compared with. Empty: the comparison's own, or the first run."""
    only: What[tuple[str, ...]] = ()
    """Variants to compare with it, by name. None: all."""
    title: Where[str] = ""
    """Heading of the page."""
