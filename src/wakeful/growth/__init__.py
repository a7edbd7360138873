"""Smaller models from larger ones: inherit blocks, train, grow (When Attention Collapses)."""

from wakeful.growth.baselines import BASELINES
from wakeful.growth.inherit import grow, inherit
from wakeful.growth.layers import LayerMap

__all__ = ["BASELINES", "LayerMap", "grow", "inherit"]
