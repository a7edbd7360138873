"""Hugging Face models: our attention for theirs.

Importing this package makes `attn_implementation="wakeful_softmax1"` known to Transformers: one
entry in each of two public registries. No model changes until it is asked for by that name.
"""

from wakeful.hf.softmax1 import register

register()
