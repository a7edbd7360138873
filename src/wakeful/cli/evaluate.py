"""The verb evaluate: what its options call."""

from wakeful.cli.console import display, finish
from wakeful.cli.parsing import leading, parse, with_out
from wakeful.config.verbs import EvaluateOptions


def run(arguments: list[str]) -> None:
    """MODEL... [options]: measure perplexity and accuracy, side by side."""
    models, rest = leading(arguments)
    options = with_out("evaluate", models, parse(EvaluateOptions, rest, "evaluate MODEL..."))

    from wakeful.verbs.evaluate import evaluate

    finish(evaluate(*models, options=options, shown=display), options.out)
