"""The vanilla Transformer."""

from wakeful.routes.base import ValueRoute


class Own(ValueRoute):
    """Every layer attends to its own values: U_n = A_n V_n (the vanilla Transformer)."""

    examples = ("own",)
    neutral = "own"
