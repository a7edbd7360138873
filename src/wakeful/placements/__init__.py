"""Placements: where the norms of a block stand."""

from wakeful.placements.base import Mixed, Peri, Placement, Post, Pre

__all__ = ["Mixed", "Peri", "Placement", "Post", "Pre"]
