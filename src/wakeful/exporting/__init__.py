"""Export a model to a folder for Transformers or a GGUF file."""

from typing import TYPE_CHECKING

from lazy_loader import attach

if TYPE_CHECKING:
    from wakeful.exporting.options import ExportOptions
    from wakeful.exporting.tool import export

__all__ = ["ExportOptions", "export"]

__getattr__, __dir__, _ = attach(
    __name__,
    submod_attrs={
        "options": ["ExportOptions"],
        "tool": ["export"],
    },
)
