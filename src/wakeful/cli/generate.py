"""The verb generate: its options and what they call."""

import dataclasses
import sys
from dataclasses import dataclass

from wakeful.cli.console import standard_input
from wakeful.cli.parsing import leading, one_model, parse
from wakeful.config.verbs import GenerateOptions


@dataclass(frozen=True, kw_only=True)
class PromptOptions(GenerateOptions):
    """How to continue a prompt."""

    prompt: str
    """Text to continue. A single dash reads it from standard input."""


def run(arguments: list[str]) -> None:
    """MODEL --prompt TEXT: continue a text, token by token."""
    models, rest = leading(arguments)
    options = parse(PromptOptions, rest, "generate MODEL")
    model = one_model(models)
    prompt = standard_input() if options.prompt == "-" else options.prompt
    names = [entry.name for entry in dataclasses.fields(GenerateOptions)]
    choice = GenerateOptions(**{name: getattr(options, name) for name in names})

    from wakeful.verbs.generate import stream

    pieces = stream(model, prompt, options=choice)
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
