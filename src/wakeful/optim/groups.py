"""Which parameters decay: matrices do; norms, biases, scalars and mixing coefficients do not."""

import re
from collections.abc import Iterable
from typing import Any

import torch

from wakeful.errors import WakefulError

NamedParameters = Iterable[tuple[str, torch.nn.Parameter]]

EMBEDDING = re.compile(r"(.*\.)?(embed|positions|embed_tokens|embed_positions|wte|wpe)\.weight")
MIXING = re.compile(r"(.*\.)?(route|depth)\.(.*\.)?weights(\.\w+)?")
HEAD = re.compile(r"(.*\.)?(head|lm_head)\.weight")


def is_embedding(name: str) -> bool:
    """Whether the name is a token or position embedding's, in our models or Hugging Face's."""
    return EMBEDDING.fullmatch(name) is not None


def is_head(name: str) -> bool:
    """Whether the name is the output head's, in our models or Hugging Face's."""
    return HEAD.fullmatch(name) is not None


def is_mixing(name: str) -> bool:
    """Whether the name is of a route's or depth mix's coefficients: numbers that weigh layers."""
    return MIXING.fullmatch(name) is not None


def decay_groups(
    named_parameters: NamedParameters, *, weight_decay: float, decay_embeddings: bool = True
) -> list[dict[str, Any]]:
    """Parameter groups for any torch optimiser, names kept: what decays, then what does not.

    Tensors with two or more dimensions decay by ``weight_decay``; others have weight decay 0, and
    so have the coefficients by which our routes and depth mixes weigh layers, whatever their shape,
    and embeddings (tokens and positions; a tied head with them) if ``decay_embeddings`` is False.
    An empty group is left out. Frozen parameters stay in: without a gradient they never move.
    Raises a WakefulError where there is no parameter, or one parameter comes twice.
    """
    decayed: list[tuple[str, torch.nn.Parameter]] = []
    kept: list[tuple[str, torch.nn.Parameter]] = []
    seen: dict[int, str] = {}
    for name, parameter in named_parameters:
        if id(parameter) in seen:
            raise WakefulError(
                f"{seen[id(parameter)]} and {name} are one parameter; pass it once, as "
                "model.named_parameters() does"
            )
        seen[id(parameter)] = name
        spared = is_mixing(name) or (is_embedding(name) and not decay_embeddings)
        decays = parameter.dim() >= 2 and not spared
        (decayed if decays else kept).append((name, parameter))
    if not seen:
        raise WakefulError("there is no parameter to optimise")
    groups = (
        {"params": decayed, "weight_decay": weight_decay},
        {"params": kept, "weight_decay": 0.0},
    )
    return [group for group in groups if group["params"]]
