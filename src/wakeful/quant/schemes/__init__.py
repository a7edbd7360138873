"""Schemes and their grids: a file's name is its variant's name, in `base` a class's."""

from wakeful.quant.schemes.base import (
    SCHEMES,
    Absmax,
    Grid,
    ScaleKind,
    Scales,
    Scheme,
    Zeropoint,
    parse_scheme,
)

__all__ = [
    "SCHEMES",
    "Absmax",
    "Grid",
    "ScaleKind",
    "Scales",
    "Scheme",
    "Zeropoint",
    "parse_scheme",
]
