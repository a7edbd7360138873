"""Hugging Face models: our attention for theirs, and our models among theirs.

Importing this package makes `attn_implementation="wakeful_softmax1"` and the model type "wakeful"
known to Transformers, through its public registries. No model changes until it is asked for.
"""

from wakeful.hf import auto, softmax1
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.modeling import WakefulForCausalLM, WakefulModel
from wakeful.hf.weights_out import export

__all__ = ["WakefulConfig", "WakefulForCausalLM", "WakefulModel", "export"]

softmax1.register()
auto.register()
