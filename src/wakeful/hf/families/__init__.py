"""Architectures of Transformers that our decoder can be: one file a family of names."""

from wakeful.hf.families import gpt2, gpt_neox, llama, olmo2, own, phi3
from wakeful.hf.families.base import Family, Link

FAMILIES: dict[str, Family] = {
    "gpt2": gpt2.FAMILY,
    "gpt_neox": gpt_neox.FAMILY,
    "llama": llama.FAMILY,
    "mistral": llama.FAMILY,
    "olmo2": olmo2.FAMILY,
    "phi3": phi3.FAMILY,
    "qwen2": llama.FAMILY,
    "qwen3": llama.FAMILY,
    "smollm3": llama.FAMILY,
    "wakeful": own.FAMILY,
}
"""By `model_type`. SmolLM is a Llama, Pythia a GPT-NeoX."""

__all__ = ["FAMILIES", "Family", "Link"]
