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
from wakeful.routes.head_norms import HeadNorm, ValueNorm
from wakeful.routes.references import (
    AttentionResidual,
    CrossLayer,
    IdentityMapping,
    KeyResidual,
    PreviousValue,
    QueryResidual,
)
from wakeful.routes.residuals import Dense, NeuTRENO, ResFormer
from wakeful.routes.sharing import CLA, SharedKeys, SharedQueries, SVFormer
from wakeful.routes.value_embedding import ValueEmbedding
from wakeful.routes.value_scale import ValueScale
from wakeful.routes.xsa import XSA

__all__ = [
    "CLA",
    "EMBEDDED",
    "FIRST_VALUE",
    "QKV",
    "TOKENS",
    "XSA",
    "Attend",
    "AttentionResidual",
    "CrossLayer",
    "Dense",
    "Differential",
    "Gated",
    "HeadNorm",
    "IdentityMapping",
    "KeyResidual",
    "Memory",
    "NeuTRENO",
    "OnLayers",
    "OutputGate",
    "Own",
    "PreviousValue",
    "QueryResidual",
    "Read",
    "ResFormer",
    "SVFormer",
    "SharedKeys",
    "SharedQueries",
    "Source",
    "Then",
    "ValueEmbedding",
    "ValueNorm",
    "ValueRoute",
    "ValueScale",
]
