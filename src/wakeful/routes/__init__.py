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
from wakeful.routes.dense import Dense
from wakeful.routes.gated import Gated
from wakeful.routes.neutreno import NeuTRENO
from wakeful.routes.references import (
    AttentionResidual,
    CrossLayer,
    IdentityMapping,
    KeyResidual,
    QueryResidual,
)
from wakeful.routes.resformer import ResFormer
from wakeful.routes.sharing import CLA, SharedKeys, SharedQueries
from wakeful.routes.svformer import SVFormer

__all__ = [
    "CLA",
    "EMBEDDED",
    "FIRST_VALUE",
    "QKV",
    "TOKENS",
    "Attend",
    "AttentionResidual",
    "CrossLayer",
    "Dense",
    "Gated",
    "IdentityMapping",
    "KeyResidual",
    "Memory",
    "NeuTRENO",
    "OnLayers",
    "Own",
    "QueryResidual",
    "Read",
    "ResFormer",
    "SVFormer",
    "SharedKeys",
    "SharedQueries",
    "Source",
    "Then",
    "ValueRoute",
]
