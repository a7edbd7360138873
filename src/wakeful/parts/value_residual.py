# Copyright 2026 the wakeful authors. SPDX-License-Identifier: Apache-2.0
"""ResFormer's value residuals and SVFormer's shared values, for any attention, in one file.

Value Residual Learning: layer n attends to a mix of its own values V_n and the first layer's V_1,
which keeps deep layers from losing what the tokens were. In an attention of your own:

    self.value_residual = ValueResidual(layer)       # where it is built; layers count from 0
    v, first = self.value_residual(v, first)         # after the projection; None in layer 0
    return self.out(attend(q, k, v)), first          # the block hands `first` to the next

Where the attention is another's, its value projections are enough:

    add_value_residuals([layer.self_attn.v_proj for layer in model.model.layers])

The mix comes before any key-value cache, which then holds V'_n: nothing else changes in decoding.
SVFormer (`mode="shared"`) takes V_1 itself, so later layers have no value projection, and
`SharedValueCache` keeps one set of values for all layers: (N + 1) / 2N of the memory.

Cite: Zhou et al. 2024, Value Residual Learning; wakeful, by its CITATION.cff.
"""

import functools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

MODES = ("identity", "constant", "learnable", "shared")


class ValueResidual(nn.Module):
    """V'_n = λ_1 V_1 + λ_2 V_n in a layer after the first; the first layer keeps its values.

    Args:
        layer: the layer's number, from 0.
        mode: "identity", ½ and ½ (eq. 7); "constant", `scale` and 1 (fig. 6); "learnable", two
            numbers that start at `init`; "shared", 1 and 0, SVFormer (eq. 10).
        scale: λ_1 of "constant".
        init: the start of (λ_1, λ_2) of "learnable".

    Raises:
        ValueError: the mode is none of these.
    """

    def __init__(
        self,
        layer: int,
        mode: str = "identity",
        *,
        scale: float = 2.0,
        init: tuple[float, float] = (0.5, 0.5),
    ) -> None:
        """Store the options; create the two weights of "learnable", except in the first layer."""
        super().__init__()
        if mode not in MODES:
            raise ValueError(f"mode={mode!r} is not one of {', '.join(MODES)}")
        self.layer, self.mode, self.scale = layer, mode, scale
        if mode == "learnable" and layer > 0:
            self.weights = nn.Parameter(torch.tensor(init))

    def forward(self, value: Tensor | None, first: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return (the values to attend to, V_1), both in the shape of `value`, whatever its layout.

        `value` is V_n, this layer's own values without rotary embeddings; it may be None where
        values are shared. `first` is V_1, the first layer's values, as the layer before returned
        it; None in the first layer.

        Raises:
            ValueError: V_n or V_1 is needed and not given.
        """
        if self.layer == 0:
            if value is None:
                raise ValueError("the first layer has no values")
            return value, value
        if first is None:
            raise ValueError(f"layer {self.layer} needs the first layer's values: pass them on")
        if self.mode == "shared":
            return first, first
        if value is None:
            raise ValueError(f"layer {self.layer} has no values, which {self.mode} mixes")
        if self.mode == "identity":
            return torch.lerp(value, first, 0.5), first
        if self.mode == "constant":
            return torch.add(value, first, alpha=self.scale), first
        weight_first, weight_own = self.weights.to(first.dtype).unbind()
        return weight_first * first + weight_own * value, first


def add_value_residuals(
    projections: Iterable[nn.Module],
    mode: str = "identity",
    *,
    columns: slice | None = None,
    scale: float = 2.0,
    init: tuple[float, float] = (0.5, 0.5),
) -> None:
    """Mix the values that a model's value projections return with those of the first projection, by
    forward hooks.

    Each projection gets an attribute `value_residual`, a module with the mode's parameters. So do
    this before the optimizer is made, and again wherever the model is built to load its weights.
    The model must compute one batch at a time; with activation checkpointing use
    `use_reentrant=False`.

    Args:
        projections: the modules that return V_n (…, width), or a tuple whose last is V_n, in the
            order of their layers.
        mode, scale, init: as `ValueResidual` takes them; "shared" needs an attention of its own.
        columns: where V_n is in the output, if that contains queries and keys too.

    Raises:
        ValueError: the mode is "shared" or unknown, or a projection has a value residual already.
    """
    if mode == "shared":
        raise ValueError("shared values leave projections out: use ValueResidual in the attention")
    first: list[Tensor | None] = [None]  # V_1 of the running forward pass, shared by all hooks
    for layer, projection in enumerate(projections):
        if hasattr(projection, "value_residual"):
            raise ValueError(f"the value projection of layer {layer} has a value residual already")
        projection.value_residual = ValueResidual(layer, mode, scale=scale, init=init)
        projection.register_forward_hook(
            functools.partial(_mix_output, first=first, columns=columns)
        )


def _mix_output(
    projection: Any, _: Any, output: Any, *, first: list[Any], columns: slice | None
) -> Any:
    """Return a projection's output with its values mixed with the first layer's; a forward hook,
    which ignores the projection's inputs.

    `first` is a list of one item, V_1 of this forward pass, which layer 0 puts there. The values
    are the last item of an output that is a tuple, else its `columns`, or all of it.
    """
    if isinstance(output, tuple):
        mixed, first[0] = projection.value_residual(output[-1], first[0])
        return (*output[:-1], mixed)
    values = output if columns is None else output[..., columns]
    mixed, first[0] = projection.value_residual(values, first[0])
    if columns is None:
        return mixed
    return torch.cat([output[..., : columns.start], mixed, output[..., columns.stop :]], -1)


class SharedValueCache:
    """Keys of every layer and one set of values, as SVFormer decodes.

    `axis` is the axis of the tokens: 2 in (B, H, L, d), 1 in (B, L, H, d).
    """

    def __init__(self, axis: int = 2) -> None:
        self.axis = axis
        self.keys: dict[int, Tensor] = {}
        self.values: Tensor | None = None

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens' keys to this layer's, and in layer 0 also their values, which all layers
        share. Return (this layer's keys, the shared values) of all tokens so far.

        In other layers `values` are ignored.
        """
        earlier_keys = [self.keys[layer]] if layer in self.keys else []
        self.keys[layer] = torch.cat([*earlier_keys, keys], self.axis)
        if layer == 0:
            earlier_values = [] if self.values is None else [self.values]
            self.values = torch.cat([*earlier_values, values], self.axis)
        assert self.values is not None, "layer 0 comes first"
        return self.keys[layer], self.values

    def nbytes(self) -> int:
        """Return the bytes of all keys and values that are held."""
        num_bytes = sum(keys.nbytes for keys in self.keys.values())
        return num_bytes + (0 if self.values is None else self.values.nbytes)
