"""The verb quantize: what its options call."""

from wakeful.cli.console import display, finish, tell
from wakeful.cli.parsing import leading, one_model, parse, with_out
from wakeful.config.verbs import QuantizeOptions


def run(arguments: list[str]) -> None:
    """MODEL [options]: quantize a model and measure what that costs."""
    models, rest = leading(arguments)
    options = parse(QuantizeOptions, rest, "quantize MODEL")
    model = one_model(models)
    options = with_out("quantize", models, options)

    from wakeful.verbs.quantize import quantize

    done = quantize(model, options=options, shown=display)
    if options.save:
        tell(f"quantized model: {options.save}")
    finish(done, options.out)
