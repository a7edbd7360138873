"""Quantize a model's linear layers and cache, measure the damage, and save what engines read.

    from wakeful.quantization import quantize_module
    small = quantize_module(module, "fine", arithmetic="integer")

`wakeful.quantize` is the tool on top of it.
"""

from typing import TYPE_CHECKING

from lazy_loader import attach

if TYPE_CHECKING:
    from wakeful.quantization.convert import quantize_module, quantized_layers, scheme_of
    from wakeful.quantization.linear import QuantizedLinear
    from wakeful.quantization.measure import measure_damage
    from wakeful.quantization.options import QuantizeOptions
    from wakeful.quantization.result import Quantization, QuantizationMatrix
    from wakeful.quantization.schemes import (
        NAMED,
        SCHEMES,
        Absmax,
        Grid,
        Scheme,
        Zeropoint,
        parse_scheme,
    )
    from wakeful.quantization.schemes.gptq import Gptq
    from wakeful.quantization.schemes.grids import E4M3, MxE2M1, NvE2M1
    from wakeful.quantization.schemes.methods import Smooth
    from wakeful.quantization.tool import quantize

__all__ = [
    "E4M3",
    "NAMED",
    "SCHEMES",
    "Absmax",
    "Gptq",
    "Grid",
    "MxE2M1",
    "NvE2M1",
    "Quantization",
    "QuantizationMatrix",
    "QuantizeOptions",
    "QuantizedLinear",
    "Scheme",
    "Smooth",
    "Zeropoint",
    "measure_damage",
    "parse_scheme",
    "quantize",
    "quantize_module",
    "quantized_layers",
    "scheme_of",
]

__getattr__, __dir__, _ = attach(
    __name__,
    submod_attrs={
        "convert": ["quantize_module", "quantized_layers", "scheme_of"],
        "linear": ["QuantizedLinear"],
        "measure": ["measure_damage"],
        "options": ["QuantizeOptions"],
        "result": ["Quantization", "QuantizationMatrix"],
        "schemes": ["NAMED", "SCHEMES", "Absmax", "Grid", "Scheme", "Zeropoint", "parse_scheme"],
        "schemes.grids": ["E4M3", "MxE2M1", "NvE2M1"],
        "schemes.gptq": ["Gptq"],
        "schemes.methods": ["Smooth"],
        "tool": ["quantize"],
    },
)
