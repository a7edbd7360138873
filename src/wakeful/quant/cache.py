"""Keys and values on a grid, as they would be cached: in our attention, and in Transformers'.

A model of Transformers looks its attention function up by name. The copy that is quantized gets a
name of its own, whose function rounds keys and values and calls the one it had. Its cache keeps
what it kept; a grid has a scale for each head and token, so that rounding what was read before
again, at every token, gives the same numbers.
"""

import sys
import zlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from wakeful.errors import WakefulError
from wakeful.implementations import KNOWN, implementation_of, name_before
from wakeful.model.attention import Attention
from wakeful.quant.schemes import Grid, Scheme


class QuantizedCache(nn.Module):
    """Keys or values (B, L, G, d) on the grid of each head and token, emulated."""

    def __init__(self, scheme: Scheme) -> None:
        super().__init__()
        self.scheme = scheme

    def forward(self, heads: Tensor) -> Tensor:
        assert self.scheme.cache is not None
        return _rounded(self.scheme.cache, heads)


def check_cache(model: nn.Module) -> None:
    """Raise `WakefulError` where a model's keys and values are out of our reach."""
    if _ours(model):
        return
    if isinstance(model, PreTrainedModel) and model._can_set_attn_implementation():
        own = implementation_of(model)
        if own not in KNOWN:
            raise WakefulError(
                f"keys and values are rounded before the attention {' or '.join(KNOWN)},"
                f" and this {type(model).__name__} has {own!r}: leave cache out of the scheme"
            )
        return
    raise _out_of_reach(model)


def with_cache(model: nn.Module, scheme: Scheme) -> nn.Module:
    """Let the attention of a model, changed in place, read keys and values on a scheme's grid.

    Raises:
        WakefulError: the model's attention is out of our reach, or what it reads is not a key and a
            value of one width each head and token (they are made of something narrower).
    """
    if scheme.cache is None:
        return model
    ours = _ours(model)
    for module in ours:
        module.quantized = QuantizedCache(scheme)
    if not ours:
        assert isinstance(model, PreTrainedModel)
        model.add_module("quantized_cache", QuantizedCache(scheme))
        _behind(model, scheme.cache)
    return model


def _ours(model: nn.Module) -> list[Attention]:
    return [each for each in model.modules() if isinstance(each, Attention)]


@torch.no_grad()
def _behind(model: PreTrainedModel, grid: Grid) -> None:
    """Give a model the attention that rounds, and see that it calls it."""
    own = implementation_of(model)
    assert own is not None
    name = name_before(own, f"{zlib.crc32(str(grid).encode()):08x}")
    widths: list[tuple[int, int]] = []

    def look(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any):
        widths.append((key.shape[-1], value.shape[-1]))
        return function(module, query, key, value, *rest, **more)

    function: Callable[..., Any] = partial(_attend, grid, own)
    masks = AttentionMaskInterface()
    AttentionMaskInterface.register(name, masks[own])
    AttentionInterface.register(name, look)
    try:
        model.set_attn_implementation(name)
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    finally:
        AttentionInterface.register(name, function)
    if not widths:
        raise _out_of_reach(model)
    if any(key != value for key, value in widths):
        raise WakefulError(
            f"{type(model).__name__} has keys {widths[0][0]} and values {widths[0][1]} wide, which "
            "it makes of something narrower that it caches: leave cache out of the scheme"
        )


def _attend(
    grid: Grid,
    own: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
    **more: Any,
):
    """Attend as a model's own implementation does, to keys and values (B, G, S, d) on a grid."""
    file = vars(sys.modules[type(module).__module__])
    interface = file.get("ALL_ATTENTION_FUNCTIONS") or AttentionInterface()
    # "eager" has an entry only while it is watched; each modeling file brings its function.
    function = interface.get(own) or file.get("eager_attention_forward")
    if function is None:
        raise WakefulError(
            f"{type(module).__name__} has no eager attention to compute beside its cache: load "
            "it with attn_implementation='sdpa', or leave cache out of the scheme"
        )
    return function(module, query, _rounded(grid, key), _rounded(grid, value), *rest, **more)


def _rounded(grid: Grid, heads: Tensor) -> Tensor:
    rows = heads.flatten(0, -2)
    return grid.fake_quantize(rows, grid.scales_of(rows)).to(heads.dtype).view_as(heads)


def _out_of_reach(model: nn.Module) -> WakefulError:
    return WakefulError(
        f"keys and values of a {type(model).__name__} cannot be quantized: its attention bypasses "
        "Transformers' AttentionInterface; leave cache out of the scheme"
    )
