"""Smaller models from larger ones: inherit blocks, train, grow (When Attention Collapses)."""

from wakeful.heirs.inherit import grow, inherit
from wakeful.heirs.layers import LayerMap

__all__ = ["LayerMap", "grow", "inherit"]
