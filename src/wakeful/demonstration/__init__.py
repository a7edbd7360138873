"""Demonstrate the library: a model made ill and cured, four twins, SmolLM2."""

from typing import TYPE_CHECKING

from lazy_loader import attach

if TYPE_CHECKING:
    from wakeful.demonstration.tool import demonstrate

__all__ = ["demonstrate"]

__getattr__, __dir__, _ = attach(
    __name__,
    submod_attrs={
        "tool": ["demonstrate"],
    },
)
