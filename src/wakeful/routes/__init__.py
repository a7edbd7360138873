"""Value routes: where a layer's queries, keys and values come from, one a file.

A new file is a new route: `variants` finds it, and nothing here need know it.
"""

from wakeful.routes.attention_residual import AttentionResidual
from wakeful.routes.base import OnLayers, Then, ValueRoute
from wakeful.routes.cla import CLA
from wakeful.routes.crosslayer import CrossLayer
from wakeful.routes.dense import Dense
from wakeful.routes.gated import Gated
from wakeful.routes.identity_mapping import IdentityMapping
from wakeful.routes.key_residual import KeyResidual
from wakeful.routes.neutreno import NeuTRENO
from wakeful.routes.own import Own
from wakeful.routes.query_residual import QueryResidual
from wakeful.routes.resformer import ResFormer
from wakeful.routes.shared_keys import SharedKeys
from wakeful.routes.shared_queries import SharedQueries
from wakeful.routes.svformer import SVFormer

__all__ = [
    "CLA", "AttentionResidual", "CrossLayer", "Dense", "Gated", "IdentityMapping", "KeyResidual",
    "NeuTRENO", "OnLayers", "Own", "QueryResidual", "ResFormer", "SVFormer", "SharedKeys",
    "SharedQueries", "Then", "ValueRoute",
]  # fmt: skip
