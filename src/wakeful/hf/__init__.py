"""Hugging Face models: our attention for theirs, and our models among theirs.

Importing this package makes `attn_implementation="wakeful_softmax1"` and the model type "wakeful"
known to Transformers, through its public registries. No model changes until it is asked for.
"""

from wakeful.hf import auto, softmax1

softmax1.register()
auto.register()
