"""Ropes: how the frequencies of rotary positions are scaled."""

from wakeful.ropes.base import RopeScaling
from wakeful.ropes.linear import Linear
from wakeful.ropes.llama3 import Llama3
from wakeful.ropes.plain import Plain

__all__ = ["Linear", "Llama3", "Plain", "RopeScaling"]
