"""Quantization of linear layers: grids, schemes, and what it does to a model.

from wakeful.quant import quantize
small = quantize(model, "fine", arithmetic="integer")
"""

from typing import TYPE_CHECKING

from lazy_loader import attach

if TYPE_CHECKING:
    from wakeful.quant.convert import quantize, quantized_layers
    from wakeful.quant.schemes import NAMED, SCHEMES, Absmax, Grid, Scheme, Zeropoint, parse_scheme

__all__ = [
    "NAMED",
    "SCHEMES",
    "Absmax",
    "Grid",
    "Scheme",
    "Zeropoint",
    "parse_scheme",
    "quantize",
    "quantized_layers",
]

__getattr__, __dir__, _ = attach(
    __name__,
    submod_attrs={
        "convert": ["quantize", "quantized_layers"],
        "schemes": ["NAMED", "SCHEMES", "Absmax", "Grid", "Scheme", "Zeropoint", "parse_scheme"],
    },
)
