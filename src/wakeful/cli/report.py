"""The verb report: its options and what they start."""

from dataclasses import dataclass
from pathlib import Path

from wakeful.cli.console import write_page
from wakeful.cli.parsing import leading, parse
from wakeful.errors import WakefulError

SUMMARY = "Write one offline HTML page about runs."


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where the report goes."""

    out: str = ""
    """HTML file to write. Empty: report.html in the first folder."""
    title: str = ""
    """Heading of the page."""


def run(arguments: list[str]) -> None:
    """RUN...: write one offline HTML page about runs or a comparison."""
    paths, rest = leading(arguments)
    options = parse(ReportOptions, rest, "report RUN...", None)
    if not paths:
        raise WakefulError("name a comparison, or one or more run directories")
    folders = [Path(path) for path in paths]
    write_page(folders, Path(options.out or folders[0] / "report.html"), options.title)
