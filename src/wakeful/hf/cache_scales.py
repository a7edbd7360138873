"""Calibrated scales of keys and values in a folder, applied where Transformers leaves them out.

compressed-tensors (0.20) puts its cache in the place of an attention layer's `past_key_values`,
which Transformers calls `cache` from 5.24 on: it then drops the scales, and keeps keys and values
as they are. vLLM reads them.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from wakeful.errors import WakefulError
from wakeful.hf.cache import CACHE


def cache_scheme_of(config: PreTrainedConfig) -> dict[str, Any]:
    """Return a configuration's `kv_cache_scheme`, empty where it has none."""
    quantized = getattr(config, "quantization_config", None)
    return (quantized.get("kv_cache_scheme") or {}) if isinstance(quantized, dict) else {}


def attach_cache_scales(
    model: PreTrainedModel, scheme: Mapping[str, Any], tensors: Mapping[str, Tensor], source: str
) -> None:
    """Make a model's attention layers, in place, quantize their keys and values as `scheme`, the
    `kv_cache_scheme` of a configuration, says. The calibrated scales are among a folder's `tensors`
    (`….k_scale`, `….v_scale`).

    A layer whose cache Transformers has quantized already stays as it is. `source` names the model
    in errors.

    Raises:
        WakefulError: `tensors` has no scales.
    """
    from compressed_tensors.modeling.kvcache import QuantizedKVCache  # noqa: PLC0415  # Transformers has read the model by it
    from compressed_tensors.quantization import (  # noqa: PLC0415
        QuantizationArgs,
        QuantizationScheme,
        QuantizationStatus,
    )

    def replace_cache(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Replace the cache in an attention layer's arguments by the layer's own quantizing cache,
        which wraps it.
        """
        cache: Any = module.get_submodule("kv_cache")
        cache.add_past_key_values(kwargs.get(CACHE))
        return args, {**kwargs, CACHE: cache}

    names = [name.removesuffix(".k_scale") for name in tensors if name.endswith(".k_scale")]
    if not names:
        raise WakefulError(f"{source} names a kv_cache_scheme and has no scales of keys and values")
    for name in names:
        attention: Any = model.get_submodule(name)
        if hasattr(attention, "kv_cache"):  # quantized by Transformers
            continue
        # The quantizing cache reads this scheme and status, and the scales below, from the layer.
        arguments = QuantizationArgs.model_validate(dict(scheme))
        attention.quantization_scheme = QuantizationScheme(targets=[], input_activations=arguments)
        attention.quantization_status = QuantizationStatus.COMPRESSED
        config = model.config.get_text_config(decoder=True)
        attention.register_module("kv_cache", QuantizedKVCache(config, attention))
        for part in ("k_scale", "v_scale"):
            scale = nn.Parameter(tensors[f"{name}.{part}"].to(model.device), requires_grad=False)
            attention.register_parameter(part, scale)
        attention.register_forward_pre_hook(replace_cache, with_kwargs=True)
