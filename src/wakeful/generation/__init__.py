"""Generate text: a continuation of a prompt, or data to train on."""

from typing import TYPE_CHECKING

from lazy_loader import attach

if TYPE_CHECKING:
    from wakeful.generation.data_options import PrepareOptions, SampleOptions
    from wakeful.generation.next_step import generation_step
    from wakeful.generation.options import GenerateOptions
    from wakeful.generation.sample import sample_data
    from wakeful.generation.tool import generate

__all__ = [
    "GenerateOptions",
    "PrepareOptions",
    "SampleOptions",
    "generate",
    "generation_step",
    "sample_data",
]

__getattr__, __dir__, _ = attach(
    __name__,
    submod_attrs={
        "data_options": ["PrepareOptions", "SampleOptions"],
        "next_step": ["generation_step"],
        "options": ["GenerateOptions"],
        "sample": ["sample_data"],
        "tool": ["generate"],
    },
)
