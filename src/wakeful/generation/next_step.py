"""The command that other tools' pages offer to hear a model write."""

import shlex

from wakeful.generation.options import GenerateOptions
from wakeful.reports.value import NextStep


def generation_step(model: str, context: int) -> NextStep:
    """Return the command that lets a model continue a prompt, with fewer tokens than usual where
    its context is short.
    """
    command = f'wakeful generate {shlex.quote(model)} --prompt "Once upon a time"'
    if context < 2 * GenerateOptions.num_tokens:
        command += f" --num_tokens {context // 2}"
    return NextStep("see what it generates", command)
