"""Names of a Transformers model's attention implementation: Transformers', ours, and wrappers."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SOFTMAX1 = "wakeful_softmax1"
"""softmax-1 in place of a model's own softmax (`wakeful.hf.softmax1`)."""
KNOWN = ("sdpa", "eager", SOFTMAX1)
"""Implementations whose queries, keys and values can be observed and rounded."""
_WRAPPER_PREFIX = "wakeful_before_"
"""Prefix of an attention that changes keys and values and then calls the one that it names."""


def wrapped_attention_name(inner: str, operation: str) -> str:
    """Return the name of a wrapper around the attention implementation `inner`, which first does
    `operation` to keys and values, such as "wakeful_before_sdpa_round".
    """
    return f"{_WRAPPER_PREFIX}{inner}_{operation}"


def attention_implementation(model: "PreTrainedModel") -> str | None:
    """Return the name of a model's attention implementation ("sdpa", "eager" ...).

    For a wrapper (`wrapped_attention_name`), such as that of a quantized cache, return the name of
    the implementation inside it.
    """
    return implementation_in_config(model.config.get_text_config(decoder=True))


def implementation_in_config(config: Any) -> str | None:
    """Return the attention implementation that a Transformers configuration names, or None; for a
    wrapper, return the name of the implementation inside it.
    """
    name = getattr(config, "_attn_implementation", None)  # absent while a config is being built
    if name and name.startswith(_WRAPPER_PREFIX):
        return name.removeprefix(_WRAPPER_PREFIX).rpartition("_")[0]
    return name
