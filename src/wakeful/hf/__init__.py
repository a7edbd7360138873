"""Hugging Face models: our attention for theirs, and our models among theirs.

Importing this package makes `attn_implementation="wakeful_softmax1"` and the model type "wakeful"
known to Transformers, through its public registries. No model changes until it is asked for.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from wakeful.hf import softmax1
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.modeling import WakefulForCausalLM, WakefulModel, as_transformers
from wakeful.hf.weights_out import export_decoder

__all__ = [
    "WakefulConfig", "WakefulForCausalLM", "WakefulModel", "as_transformers", "export_decoder",
]  # fmt: skip

softmax1.register_softmax1()
AutoConfig.register(WakefulConfig.model_type, WakefulConfig, exist_ok=True)
AutoModel.register(WakefulConfig, WakefulModel, exist_ok=True)
AutoModelForCausalLM.register(WakefulConfig, WakefulForCausalLM, exist_ok=True)
