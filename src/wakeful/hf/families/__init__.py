"""Architectures of Transformers that our decoder can be: one file a family of names."""

from wakeful.hf.families import gemma, gpt2, gpt_neox, llama, olmo2, own, phi3
from wakeful.hf.families.base import Family, Link

FAMILIES: dict[str, Family] = {
    "gemma2": gemma.FAMILY,
    "gemma3_text": gemma.FAMILY,
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

CANNOT = {
    "gemma3": "it reads pictures too; its text part alone, a gemma3_text, can be read",
    "qwen3_5": "most of its layers are linear attention (layer_types)",
    "qwen3_5_text": "most of its layers are linear attention (layer_types)",
}
"""Why our decoder cannot be some that might be looked for here, by `model_type`."""

__all__ = ["CANNOT", "FAMILIES", "Family", "Link"]
