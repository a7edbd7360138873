"""What is done to a model that exists, without training: the same function in other weights."""

from wakeful.surgery.rotate import rotate

__all__ = ["rotate"]
