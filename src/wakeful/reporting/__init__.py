"""Report on finished runs on one page."""

from typing import TYPE_CHECKING

from lazy_loader import attach

if TYPE_CHECKING:
    from wakeful.reporting.options import ReportOptions
    from wakeful.reporting.tool import StoredResult, report

__all__ = ["ReportOptions", "StoredResult", "report"]

__getattr__, __dir__, _ = attach(
    __name__,
    submod_attrs={
        "options": ["ReportOptions"],
        "tool": ["StoredResult", "report"],
    },
)
