"""The verb `wakeful reproduce`."""

from pathlib import Path
from typing import Any

from wakeful.cli.console import OUT, print_result, progress_display
from wakeful.cli.verbs import read_arguments
from wakeful.variants.plugins import Verb
from wakeful_papers.options import ReproduceOptions


def _run(arguments: list[str]) -> None:
    names, options = read_arguments("reproduce", arguments)

    from wakeful_papers.verbs.reproduce import list_exhibits, reproduce

    if not names and not options.all:
        OUT.print(list_exhibits(options))
        return
    done = reproduce(*names, options=options, display=progress_display)
    print_result(done, done.page)


def _report(*folders: Path, **kwargs: Any) -> Any:
    from wakeful_papers.verbs.reproduce import write_claims_page

    return write_claims_page(*folders, **kwargs)


REPRODUCE = Verb(
    summary="Run a paper's figure or table and judge its claims; list them all.",
    usage="[PAPER/EXHIBIT...]",
    run=_run,
    options=ReproduceOptions,
    examples=(
        ("wakeful reproduce", "List every figure and table, and what each costs."),
        (
            "wakeful reproduce value-residual/fig6 --scale tiny",
            "Run one of them in minutes and judge what the paper claims of it.",
        ),
    ),
    argument_help={
        "PAPER/EXHIBIT": "a figure or table, or PAPER for all of its; without one, a list"
    },
    report=_report,
)
