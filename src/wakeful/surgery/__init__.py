"""What is done to a model that exists, without training: the same function in other weights."""

from wakeful.surgery.prefix import choose_prefix, store_prefix
from wakeful.surgery.rotate import rotate

__all__ = ["choose_prefix", "rotate", "store_prefix"]
