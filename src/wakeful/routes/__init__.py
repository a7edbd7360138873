"""Value routes: where a layer's values come from."""

from wakeful.routes.base import (
    EMBEDDED,
    FIRST_VALUE,
    QKV,
    TOKENS,
    Attend,
    Memory,
    OnLayers,
    Own,
    Read,
    Source,
    Then,
    ValueRoute,
)
from wakeful.routes.differential import Differential
from wakeful.routes.gated import Gated
from wakeful.routes.gates import OutputGate
from wakeful.routes.residuals import NeuTRENO, ResFormer
from wakeful.routes.sharing import CLA, SVFormer
from wakeful.routes.value_embedding import ValueEmbedding

__all__ = [
    "CLA",
    "EMBEDDED",
    "FIRST_VALUE",
    "QKV",
    "TOKENS",
    "Attend",
    "Differential",
    "Gated",
    "Memory",
    "NeuTRENO",
    "OnLayers",
    "OutputGate",
    "Own",
    "Read",
    "ResFormer",
    "SVFormer",
    "Source",
    "Then",
    "ValueEmbedding",
    "ValueRoute",
]
