"""The verb diagnose: what its options call."""

from wakeful.cli.console import display, finish
from wakeful.cli.parsing import leading, parse, with_out
from wakeful.config.verbs import DiagnoseOptions


def run(arguments: list[str]) -> None:
    """MODEL... [options]: measure sinks, lazy layers, drained values and outliers."""
    models, rest = leading(arguments)
    options = with_out("diagnose", models, parse(DiagnoseOptions, rest, "diagnose MODEL..."))

    from wakeful.verbs.diagnose import diagnose

    finish(diagnose(*models, options=options, shown=display), options.out)
