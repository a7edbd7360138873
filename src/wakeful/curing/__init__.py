"""Cure a model that exists: rotate, store a prefix, add sinks, without training."""

from typing import TYPE_CHECKING

from lazy_loader import attach

if TYPE_CHECKING:
    from wakeful.curing.options import CureOptions
    from wakeful.curing.tool import Cure, cure

__all__ = ["Cure", "CureOptions", "cure"]

__getattr__, __dir__, _ = attach(
    __name__,
    submod_attrs={
        "options": ["CureOptions"],
        "tool": ["Cure", "cure"],
    },
)
