"""The verb report: its options and what they start."""

from dataclasses import dataclass
from pathlib import Path

from wakeful.cli.console import tell, write_page
from wakeful.cli.parsing import leading, parse
from wakeful.errors import WakefulError


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """Where the report goes."""

    out: str = ""
    """HTML file to write. Empty: report.html in the first folder."""
    title: str = ""
    """Heading of the page."""


def run(arguments: list[str]) -> None:
    """RUN...: write one offline HTML page about runs or a comparison."""
    from wakeful.runs.run import Run

    paths, rest = leading(arguments)
    options = parse(ReportOptions, rest, "report RUN...", None)
    if not paths:
        raise WakefulError("name a comparison, or one or more run directories")
    folders = [Path(path) for path in paths]
    if len(folders) == 1 and Run.open(folders[0]).header.get("kind") == "inherit":
        from wakeful.pages.inheritance.page import write_inheritance

        if options.title:
            raise WakefulError("the page of an inheritance has its own title: leave out --title")
        tell(f"report: {write_inheritance(folders[0], options.out)}")
        return
    write_page(folders, Path(options.out or folders[0] / "report.html"), options.title)
