"""Placements: where a block's norms stand."""

from wakeful.placements.base import NormOrder, Placement, Pre
from wakeful.placements.mixed import Mixed
from wakeful.placements.peri import Peri
from wakeful.placements.post import Post
from wakeful.placements.reordered import Reordered

__all__ = ["Mixed", "NormOrder", "Peri", "Placement", "Post", "Pre", "Reordered"]
