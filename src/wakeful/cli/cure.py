"""The verb cure: what its options call."""

from wakeful.cli.console import display, finish
from wakeful.cli.parsing import leading, one_model, parse, with_out
from wakeful.config.verbs import CureOptions


def run(arguments: list[str]) -> None:
    """MODEL [options]: the same function without outliers, as a folder that Transformers loads."""
    models, rest = leading(arguments)
    options = with_out("cure", models, parse(CureOptions, rest, "cure MODEL"))

    from wakeful.verbs.cure import cure

    finish(cure(one_model(models), options=options, shown=display), options.out)
