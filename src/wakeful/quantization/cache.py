"""Keys and values on a grid, as they would be cached: in our attention, and in Transformers'.

A scale is of each head and token, of a block of channels of those (a grid's `group`), or of
calibration text and then fixed: one for all keys of a layer and one for all its values (`tensor`),
or one for each channel of each head (`channel`). The cache keeps what it kept, so that what was
read before is rounded again at every token, to the same numbers.

A model of Transformers looks its attention function up by name. The copy that is quantized gets a
name of its own, whose function rounds keys and values and calls the one it had.
"""

import sys
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from wakeful.errors import WakefulError
from wakeful.model.attention import Attention
from wakeful.probes.running import logits_of
from wakeful.quantization.linear import KeepsBuffers
from wakeful.quantization.schemes import Scales, Scheme
from wakeful.variants.implementations import KNOWN, attention_implementation, wrapped_attention_name

CachePart = Literal["keys", "values"]
_NAME = "quantized_cache"
"""Attribute of a Transformers attention layer that holds its quantized cache."""


class QuantizedCache(KeepsBuffers):
    """Keys and values (B, L, G, d) of one layer on a scheme's grid, emulated.

    Buffers, where no token has a scale of its own: `keys` and `values`, (2, 1) per tensor or
    (2, G · d) per channel, the smallest and the largest number of calibration text and 0.
    """

    fixed_buffers = ("keys", "values")

    def __init__(self, scheme: Scheme, channels: int) -> None:
        super().__init__()
        assert scheme.cache is not None
        self.scheme = scheme
        self.grid = scheme.cache
        self.watching = False
        shared = {"tensor": 1, "channel": channels}.get(self.grid.per)
        for part in self.fixed_buffers:
            self.register_buffer(part, None if shared is None else torch.zeros(2, shared))

    def forward(self, heads: Tensor, part: CachePart) -> Tensor:
        last = -3 if self.grid.per == "channel" else -2
        rows = heads.flatten(0, last).flatten(1).float()
        bounds: Tensor | None = getattr(self, part)
        if self.watching and bounds is not None:
            low, high = rows.aminmax(dim=0, keepdim=True)
            if bounds.shape[1] == 1:
                low, high = low.min().view(1, 1), high.max().view(1, 1)
            setattr(self, part, torch.cat([bounds[:1].minimum(low), bounds[1:].maximum(high)]))
            return heads
        scales = self.grid.scales_of(rows) if bounds is None else self.fixed_scales(part, rows)
        return self.grid.fake_quantize(rows, scales).to(heads.dtype).view(heads.shape)

    def fixed_scales(self, part: CachePart, rows: Tensor | None = None) -> Scales:
        """Return the scales of calibration text; of two levels, those of these rows."""
        bounds: Tensor = getattr(self, part)
        if self.grid.two_scales and rows is not None:
            return self.grid.refit(rows, self.grid.scales_of(bounds.T))
        return self.grid.fit(bounds[:1], bounds[1:])


@torch.no_grad()
def calibrate_cache(model: nn.Module, calibration: Sequence[Tensor]) -> None:
    """Set the fixed scales of a model's caches, in place, from the keys and values of a text."""
    caches = [cache for cache in model.modules() if isinstance(cache, QuantizedCache)]
    for cache in caches:
        cache.watching = True
    for tokens in calibration:
        logits_of(model, tokens)
    for cache in caches:
        cache.watching = False


def check_cache(model: nn.Module) -> None:
    """Raise `WakefulError` where a model's keys and values are out of our reach."""
    if _attentions(model):
        return
    if isinstance(model, PreTrainedModel) and model._can_set_attn_implementation():
        own = attention_implementation(model)
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
    check_cache(model)
    attentions, device = _attentions(model), next(model.parameters()).device
    for module in attentions:
        module.quantized = QuantizedCache(scheme, module.cached_channels).to(device)
    if not attentions:
        assert isinstance(model, PreTrainedModel)
        _install_attention(model, scheme)
    return model


def _attentions(model: nn.Module) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


@torch.no_grad()
def _install_attention(model: PreTrainedModel, scheme: Scheme) -> None:
    """Install an attention function that rounds the cache, one cache grid for each layer."""
    implementation = attention_implementation(model)
    assert implementation is not None
    name = wrapped_attention_name(implementation, f"{zlib.crc32(str(scheme.cache).encode()):08x}")
    widths: list[tuple[int, int]] = []

    def first_call(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any
    ):
        widths.append((key.shape[-1], value.shape[-1]))
        module.add_module(
            _NAME, QuantizedCache(scheme, key.shape[1] * key.shape[-1]).to(key.device)
        )
        return function(module, query, key, value, *rest, **more)

    function: Callable[..., Any] = partial(_attend, implementation)
    masks = AttentionMaskInterface()
    AttentionMaskInterface.register(name, masks[implementation])
    AttentionInterface.register(name, first_call)
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
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
    **more: Any,
):
    """Attend as a model's own implementation does, to keys and values (B, G, S, d) on a grid."""
    cache = module.get_submodule(_NAME)
    key, value = (
        cache(heads.transpose(1, 2), part).transpose(1, 2)
        for heads, part in ((key, "keys"), (value, "values"))
    )
    file = vars(sys.modules[type(module).__module__])
    interface = file.get("ALL_ATTENTION_FUNCTIONS") or AttentionInterface()
    # "eager" has an entry only while it is watched; each modeling file brings its function.
    function = interface.get(implementation) or file.get("eager_attention_forward")
    if function is None:
        raise WakefulError(
            f"{type(module).__name__} has no eager attention to compute beside its cache: load "
            "it with attn_implementation='sdpa', or leave cache out of the scheme"
        )
    return function(module, query, key, value, *rest, **more)


def _out_of_reach(model: nn.Module) -> WakefulError:
    return WakefulError(
        f"keys and values of a {type(model).__name__} cannot be quantized: its attention bypasses "
        "Transformers' AttentionInterface; leave cache out of the scheme"
    )
