"""A model's layers in several formats at once, of which each layer may take one.

Calibration text is read once for all formats that round by the same method.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.evaluating import evaluating
from wakeful.quantization.arithmetic import Arithmetic
from wakeful.quantization.layerwise import fit, portions
from wakeful.quantization.linear import QuantizedLinear, matrix, quantized
from wakeful.quantization.observing import observe
from wakeful.quantization.schemes import Absmax, Scheme
from wakeful.quantization.schemes.methods import Gptq
from wakeful.quantization.weighing import token_weights
from wakeful.terminal.display import OnProgress, ignore_progress

Formats = Mapping[Scheme, Mapping[str, QuantizedLinear]]
"""The quantized form of each layer, by format and by the layer's name."""


def _four_bits(group: int) -> Scheme:
    grid = Absmax(bits=4, per="channel", group=group, scale="bfloat16")
    return Scheme(weights=grid, method=Gptq())


VLLM: Mapping[str, Scheme] = {
    "W4A16 in groups of 128": _four_bits(128),
    "W4A16 in groups of 64": _four_bits(64),
    "W4A16 in groups of 32": _four_bits(32),
    "W8A16": Scheme(weights=Absmax(bits=8, per="channel", scale="bfloat16")),
}
"""The formats of weights that vLLM runs, the smallest first, with scales of bfloat16."""


def fits(layer: nn.Module, scheme: Scheme) -> bool:
    """Tell whether a layer's inputs are whole groups of a format."""
    group = scheme.weights.group if scheme.weights is not None else 0
    return not group or matrix(layer)[0].shape[1] % group == 0


def quantize_formats(
    model: nn.Module,
    layers: Mapping[str, nn.Module],
    schemes: Sequence[Scheme],
    text: Sequence[Tensor],
    *,
    arithmetic: Arithmetic = "integer",
    on_progress: OnProgress = ignore_progress,
) -> Formats:
    """Return the layers of a model in each of several formats of weights alone, where they fit.

    What is rounded by a method sees the model in full precision. The model stays as it is.

    Raises:
        WakefulError: a format quantizes more than weights, or rounds block after block.
    """
    for scheme in schemes:
        if scheme.activations or scheme.cache or scheme.rounding.sequential:
            raise WakefulError(f"{scheme} is no format of weights alone")
    formats: dict[Scheme, dict[str, QuantizedLinear]] = {scheme: {} for scheme in schemes}
    calibrated = [scheme for scheme in schemes if scheme.method is not None]
    total, done = len(schemes) * len(layers), 0
    with evaluating(model):
        together = fit(layers)
        weighed = any(scheme.rounding.weighs_tokens for scheme in calibrated)
        weights = token_weights(model, layers, text) if weighed and not together else None
        for part in portions(model, layers, text) if calibrated else [dict(layers)]:
            seen = {}
            if calibrated:
                seen = observe(
                    model, part, text, products=True,
                    weights=weights, weighs=weighed and together,
                )  # fmt: skip
            for name, layer in part.items():
                for scheme in schemes:
                    if fits(layer, scheme):
                        formats[scheme][name] = quantized(layer, scheme, arithmetic, seen.get(name))
                    done += 1
                on_progress(done, total)
    return formats
