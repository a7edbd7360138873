"""Parts for training code of your own: each is one file that imports nothing but torch.

    from wakeful.parts import softmax1_attention, OrthoAdam, ValueResidual

`wakeful parts softmax1 > softmax1.py` prints a file to copy.
"""

from typing import TYPE_CHECKING

from lazy_loader import attach

if TYPE_CHECKING:
    from wakeful.parts.inherit_layers import inherit_layers
    from wakeful.parts.orthoadam import OrthoAdam
    from wakeful.parts.rmsnorm_single import RMSNormSingle
    from wakeful.parts.softmax1 import softmax1_attention
    from wakeful.parts.value_residual import SharedValueCache, ValueResidual, add_value_residuals

__all__ = [
    "OrthoAdam", "RMSNormSingle", "SharedValueCache", "ValueResidual", "add_value_residuals",
    "inherit_layers", "softmax1_attention",
]  # fmt: skip

__getattr__, __dir__, _ = attach(
    __name__,
    submod_attrs={
        "inherit_layers": ["inherit_layers"],
        "orthoadam": ["OrthoAdam"],
        "rmsnorm_single": ["RMSNormSingle"],
        "softmax1": ["softmax1_attention"],
        "value_residual": ["SharedValueCache", "ValueResidual", "add_value_residuals"],
    },
)
