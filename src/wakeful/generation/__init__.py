"""Generate text: a continuation of a prompt."""

from typing import TYPE_CHECKING

from lazy_loader import attach

if TYPE_CHECKING:
    from wakeful.generation.next_step import generation_step
    from wakeful.generation.options import GenerateOptions
    from wakeful.generation.tool import generate

__all__ = [
    "GenerateOptions",
    "generate",
    "generation_step",
]

__getattr__, __dir__, _ = attach(
    __name__,
    submod_attrs={
        "next_step": ["generation_step"],
        "options": ["GenerateOptions"],
        "tool": ["generate"],
    },
)
