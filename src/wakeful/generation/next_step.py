"""The command that other tools' pages offer to hear a model write."""

import shlex

from wakeful.generation.options import GenerateOptions
from wakeful.reports.value import NextStep


def generation_step(model: str, context: int) -> NextStep:
    """Return how to let a model write, as far as its context leaves room."""
    fewer = f" --num_tokens {context // 2}" if context < 2 * GenerateOptions.num_tokens else ""
    command = f'wakeful generate {shlex.quote(model)} --prompt "Once upon a time"{fewer}'
    return NextStep("see what it generates", command)
