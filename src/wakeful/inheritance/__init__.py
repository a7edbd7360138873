"""Make a smaller model of a larger one: choose layers, bridge the gaps, heal, grow."""

from typing import TYPE_CHECKING

from lazy_loader import attach

if TYPE_CHECKING:
    from wakeful.inheritance.blocks import inherit_blocks
    from wakeful.inheritance.layers import LayerMap, named_layers
    from wakeful.inheritance.options import InheritOptions
    from wakeful.inheritance.report import inheritance_report
    from wakeful.inheritance.result import Inheritance
    from wakeful.inheritance.tool import inherit

__all__ = [
    "InheritOptions",
    "Inheritance",
    "LayerMap",
    "inherit",
    "inherit_blocks",
    "inheritance_report",
    "named_layers",
]

__getattr__, __dir__, _ = attach(
    __name__,
    submod_attrs={
        "blocks": ["inherit_blocks"],
        "layers": ["LayerMap", "named_layers"],
        "options": ["InheritOptions"],
        "report": ["inheritance_report"],
        "result": ["Inheritance"],
        "tool": ["inherit"],
    },
)
