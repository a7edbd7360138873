"""The command that other tools' pages offer to hear a model write."""

import shlex

from wakeful.generation.options import GenerateOptions
from wakeful.reports.value import NextStep


def generation_step(model: str, context: int) -> NextStep:
    """Return the command that lets a model continue a prompt, with fewer tokens than usual where
    its context is short.
    """
    is_short = context < 2 * GenerateOptions.num_tokens
    num_tokens = f" --num_tokens {context // 2}" if is_short else ""
    command = f'wakeful generate {shlex.quote(model)} --prompt "Once upon a time"{num_tokens}'
    return NextStep("see what it generates", command)
