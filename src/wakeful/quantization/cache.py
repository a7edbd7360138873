"""Quantized key/value cache, emulated: attention reads rounded keys and values.

Scales are computed for each head of each token, or for each `group` of its channels; or they come
from calibration text and are fixed: for the keys of a layer one per head (`per="head"`) or one for
all (`per="tensor"`), and likewise for its values. The cache itself holds full-precision numbers,
which are rounded again, to the same numbers, whenever they are read.

A Transformers model looks its attention function up by name. The quantized copy of a model gets a
new name, whose function rounds keys and values and then calls the original one.
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
from wakeful.quantization.linear import FixedDtypeModule
from wakeful.quantization.schemes import Scales, Scheme
from wakeful.variants.implementations import KNOWN, attention_implementation, wrapped_attention_name

CachePart = Literal["keys", "values"]
_NAME = "quantized_cache"
"""Attribute of a Transformers attention layer that holds its quantized cache."""


class QuantizedCache(FixedDtypeModule):
    """Rounding of one layer's keys and values (B, L, G, d) to a scheme's number format.

    Where scales are fixed, the buffers `keys` and `values` hold the range of calibration text, its
    minimum (at most 0) and its maximum (at least 0), as (2, 1), or (2, G) where each head has a
    scale: (2, 1) until calibration.
    """

    fixed_buffers = ("keys", "values")

    def __init__(self, scheme: Scheme) -> None:
        """Prepare the rounding to `scheme.cache`; if its scales are fixed, the ranges of keys and
        values start as 0 to 0.
        """
        super().__init__()
        assert scheme.cache is not None
        self.scheme = scheme
        self.grid = scheme.cache
        self.calibrating = False
        # Scales per token are computed whenever they are needed: no range is stored.
        for part in self.fixed_buffers:
            self.register_buffer(part, torch.zeros(2, 1) if scheme.calibrates_cache else None)

    def forward(self, heads: Tensor, part: CachePart) -> Tensor:
        """Return keys or values (B, L, G, d) after rounding them; `part` says which of the two they
        are.

        Where the scheme has fixed scales, they come from recorded ranges; while `calibrating`, such
        keys or values are returned unrounded and only widen their range. Otherwise each head of a
        token has a scale of its own.
        """
        rows = heads.flatten(0, -2).float()  # one head of a token each: (B·L·G, d)
        bounds: Tensor | None = getattr(self, part)
        if bounds is None:
            scales = self.grid.compute_scales(rows)
        elif self.calibrating:
            setattr(self, part, self._widen(bounds, heads.float()))
            return heads
        else:
            scales = self.fixed_scales(part)
            if self.grid.per == "head":  # the heads' scales, repeated for each token
                num_tokens = len(rows) // len(scales.scale)
                scales = scales.repeat(num_tokens)
        return self.grid.fake_quantize(rows, scales).to(heads.dtype).view(heads.shape)

    def _widen(self, bounds: Tensor, heads: Tensor) -> Tensor:
        """Return the range `bounds` widened to cover keys or values `heads` (B, L, G, d): minimum
        and maximum, as (2, G) where each head has a scale, else (2, 1).
        """
        if self.grid.per == "head":
            low, high = heads.amin((0, 1, 3)), heads.amax((0, 1, 3))
        else:
            low, high = torch.aminmax(heads)
        return torch.stack([bounds[0].minimum(low), bounds[1].maximum(high)])

    def fixed_scales(self, part: CachePart) -> Scales:
        """Return the scales that calibration text gave for the keys or for the values: (1, 1), or
        (G, 1) where each head has one.
        """
        bounds: Tensor = getattr(self, part)
        smallest, largest = bounds.unsqueeze(-1)
        return self.grid.fit_scales(smallest, largest)


@torch.no_grad()
def calibrate_cache(model: nn.Module, calibration: Sequence[Tensor]) -> None:
    """Set the fixed scales of a model's quantized caches, in place, by running calibration text.

    `calibration` holds token ids (B, L).
    """
    caches = [cache for cache in model.modules() if isinstance(cache, QuantizedCache)]
    for cache in caches:
        cache.calibrating = True
    for tokens in calibration:
        logits_of(model, tokens)  # each pass widens the ranges that the caches record
    for cache in caches:
        cache.calibrating = False


def check_cache_support(model: nn.Module) -> None:
    """Raise `WakefulError` if the keys and values of a model's attention cannot be quantized."""
    if _attention_modules(model):  # a model with our own attention
        return
    if isinstance(model, PreTrainedModel) and model._can_set_attn_implementation():
        implementation = attention_implementation(model)
        if implementation not in KNOWN:
            raise WakefulError(
                f"keys and values can be quantized with the attention {' or '.join(KNOWN)}, and "
                f"this {type(model).__name__} has {implementation!r}: leave cache out of the scheme"
            )
        return
    raise _unsupported_attention(model)


def quantize_cache(model: nn.Module, scheme: Scheme) -> nn.Module:
    """Make a model's attention read rounded keys and values, in place, if the scheme has a format
    for the cache; return the model.

    Raises:
        WakefulError: the model's attention is not supported, or its keys and values differ in
            width: then it caches something narrower, from which both are computed.
    """
    if scheme.cache is None:
        return model
    check_cache_support(model)
    attentions, device = _attention_modules(model), next(model.parameters()).device
    for module in attentions:
        module.quantized = QuantizedCache(scheme).to(device)
    if not attentions:  # a model of Transformers, whose attention is a function
        assert isinstance(model, PreTrainedModel)
        _install_attention(model, scheme)
    return model


def _attention_modules(model: nn.Module) -> list[Attention]:
    return [module for module in model.modules() if isinstance(module, Attention)]


@torch.no_grad()
def _install_attention(model: PreTrainedModel, scheme: Scheme) -> None:
    """Install an attention function that rounds keys and values, and a `QuantizedCache` per layer.

    Which modules attend, and the width of their keys and values, shows in a first forward pass over
    two tokens: the modules get their caches in it.

    Raises:
        WakefulError: no module attends by such a function, or keys and values differ in width.
    """
    implementation = attention_implementation(model)
    assert implementation is not None
    # One name for each number format: functions are registered for all models of the process.
    name = wrapped_attention_name(implementation, f"{zlib.crc32(str(scheme.cache).encode()):08x}")
    attend_to_rounded: Callable[..., Any] = partial(_attend_to_rounded, implementation)
    widths: list[tuple[int, int]] = []

    def add_cache_and_attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **more: Any
    ):
        """Attention function of the first pass: give the module its cache, then attend."""
        widths.append((key.shape[-1], value.shape[-1]))
        module.add_module(_NAME, QuantizedCache(scheme).to(key.device))
        return attend_to_rounded(module, query, key, value, *rest, **more)

    masks = AttentionMaskInterface()
    AttentionMaskInterface.register(name, masks[implementation])  # the same masks as before
    AttentionInterface.register(name, add_cache_and_attend)
    try:
        model.set_attn_implementation(name)
        model(input_ids=torch.zeros(1, 2, dtype=torch.long, device=model.device), use_cache=False)
    finally:
        AttentionInterface.register(name, attend_to_rounded)  # the first pass is over
    if not widths:
        raise _unsupported_attention(model)
    if any(key != value for key, value in widths):
        raise WakefulError(
            f"{type(model).__name__} has keys {widths[0][0]} and values {widths[0][1]} wide: it "
            "caches something narrower, which cannot be quantized; leave cache out of the scheme"
        )


def _attend_to_rounded(
    implementation: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *rest: Any,
    **more: Any,
):
    """Round keys and values (B, G, S, d), then call the model's own attention function.

    `implementation` is the name of that function, such as "sdpa"; `rest` and `more` are passed on.
    `module`, the attention layer, holds the quantized cache that rounds.
    """
    cache = module.get_submodule(_NAME)  # which takes (B, S, G, d)
    rounded_key = cache(key.transpose(1, 2), "keys").transpose(1, 2)
    rounded_value = cache(value.transpose(1, 2), "values").transpose(1, 2)
    modeling_file = vars(sys.modules[type(module).__module__])
    interface = modeling_file.get("ALL_ATTENTION_FUNCTIONS") or AttentionInterface()
    # "eager" is normally no entry of the interface: each modeling file defines its own function.
    function = interface.get(implementation) or modeling_file.get("eager_attention_forward")
    if function is None:
        raise WakefulError(
            f"{type(module).__name__} has no eager attention function: load it with "
            "attn_implementation='sdpa', or leave cache out of the scheme"
        )
    return function(module, query, rounded_key, rounded_value, *rest, **more)


def _unsupported_attention(model: nn.Module) -> WakefulError:
    return WakefulError(
        f"keys and values of a {type(model).__name__} cannot be quantized: its attention bypasses "
        "Transformers' AttentionInterface; leave cache out of the scheme"
    )
