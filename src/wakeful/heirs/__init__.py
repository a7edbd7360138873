"""Smaller models from larger ones: inherit blocks, train, grow (When Attention Collapses)."""

from wakeful.heirs.baselines import BASELINES
from wakeful.heirs.inherit import grow, inherit
from wakeful.heirs.layers import LayerMap

__all__ = ["BASELINES", "LayerMap", "grow", "inherit"]
