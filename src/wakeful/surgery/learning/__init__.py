"""Rotations that are learned on text, and the losses they lower."""

from wakeful.surgery.learning.learned import Learned, learned_of

__all__ = ["Learned", "learned_of"]
