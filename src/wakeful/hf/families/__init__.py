"""Architectures of Transformers that our decoder can be: one file a family of names."""

from wakeful.hf.families import gemma, gpt2, gpt_neox, granite, llama, olmo2, own, phi3
from wakeful.hf.families.base import Family, Link

STOCK = (
    llama.FAMILY, phi3.FAMILY, olmo2.FAMILY, gemma.FAMILY, granite.FAMILY, gpt2.FAMILY,
    gpt_neox.FAMILY,
)  # fmt: skip
"""Families that a decoder is tried on, in this order, before it is written as our own class. It
fits where `from_hf_config` returns its configuration from the result of `to_hf_config`."""
FAMILIES: dict[str, Family] = {
    model_type: family for family in (*STOCK, own.FAMILY) for model_type in family.model_types
}
"""By `model_type`. SmolLM is a Llama, Pythia a GPT-NeoX."""

CANNOT = {
    "gemma3": "it reads pictures too; its text part alone, a gemma3_text, can be read",
}
"""Why our decoder cannot be some that might be looked for here, by `model_type`."""

__all__ = ["CANNOT", "FAMILIES", "STOCK", "Family", "Link"]
