"""Quantisation of linear layers: grids, schemes, and what it does to a model.

from wakeful.quant import quantize
small = quantize(model, "fine", arithmetic="integer")
"""

from wakeful.quant.convert import quantised_layers, quantize
from wakeful.quant.schemes import SCHEMES, Rule, Scheme, parse_scheme

__all__ = ["SCHEMES", "Rule", "Scheme", "parse_scheme", "quantised_layers", "quantize"]
