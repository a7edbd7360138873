# Copyright 2026 the wakeful authors. SPDX-License-Identifier: Apache-2.0
"""Inheritune's start on the state dict of any decoder, in one file.

When Attention Collapses: deep layers of trained models attend to one token and do little, so a
smaller model starts from the first layers of a larger one and is trained on.

    weights = inherit_layers(reference.state_dict(), len(blocks) // 2)
    model = Model(config_with_half_the_layers)
    model.load_state_dict(weights)

Embeddings, the final norm and the head are kept. Then train; where the loss stays behind the
reference's, start again with more layers, as the paper does. `wakeful inherit` measures which
layers to keep, bridges those that are left out and trains to parity.

Cite: Sanyal et al. 2024, When Attention Collapses; wakeful, by its CITATION.cff.
"""

import re
from collections.abc import Mapping, Sequence

from torch import Tensor

_LAYER = re.compile(r"((?:[^.0-9][^.]*\.)*)([0-9]+)\.(.+)")
"""A name's stack, its layer's number and what follows: `model.layers.`, 3, `mlp.up_proj.weight`."""


def inherit_layers(
    state_dict: Mapping[str, Tensor], layers: int | Sequence[int], *, stack: str = ""
) -> dict[str, Tensor]:
    """Return the weights of a smaller model: those of the chosen layers, numbered from 0, and all
    weights outside the stack of layers.

    Args:
        state_dict: weights by name. Tensors are shared with it, not copied.
        layers: the number of first layers to keep, or the numbers of the layers to keep, in their
            new order. A number that is repeated gives several layers with the same tensors.
        stack: prefix of the layers' names, such as "model.layers."; not needed for a model with one
            stack of layers.

    Raises:
        ValueError: there is no stack, several to choose from, or no such layer.
    """
    matches = {name: _LAYER.fullmatch(name) for name in state_dict}
    stacks: dict[str, set[int]] = {}  # by a stack's prefix, the numbers of its layers
    for match in filter(None, matches.values()):
        stacks.setdefault(match[1], set()).add(int(match[2]))
    if not stack and len(stacks) == 1:
        (stack,) = stacks
    if stack not in stacks:
        names = ", ".join(f"{name!r} ({len(numbers)})" for name, numbers in stacks.items())
        raise ValueError(f"name one stack of layers by stack=: there is {names or 'none'}")
    kept = list(range(layers)) if isinstance(layers, int) else list(layers)
    missing = sorted(set(kept) - stacks[stack])
    if missing or not kept:
        raise ValueError(
            f"{stack!r} has {len(stacks[stack])} layers, and none of {missing or kept}"
        )
    result: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        match = matches[name]  # (stack, layer's number, rest) of the name
        if match is None or match[1] != stack:
            result[name] = tensor
            continue
        for new_number, layer in enumerate(kept):
            if layer == int(match[2]):
                result[f"{stack}{new_number}.{match[3]}"] = tensor
    return result
