"""The verb report: its options and what they call."""

from wakeful.cli.console import OUT, tell
from wakeful.cli.parsing import leading, parse
from wakeful.config.verbs import ReportOptions


def run(arguments: list[str]) -> None:
    """RUN...: write one offline HTML page about runs, a comparison or an inheritance."""
    folders, rest = leading(arguments)
    options = parse(ReportOptions, rest, "report RUN...")

    from wakeful.verbs.report import report

    done = report(*folders, out=options.out, title=options.title)
    OUT.print(done)
    tell(f"report: {done.page}")
