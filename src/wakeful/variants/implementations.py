"""Names of a Transformers model's attention: theirs, ours, and those put before it."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SOFTMAX1 = "wakeful_softmax1"
"""softmax-1 in place of a model's own softmax (`wakeful.hf.softmax1`)."""
KNOWN = ("sdpa", "eager", SOFTMAX1)
"""Those whose queries, keys and values can be watched and rounded."""
_BEFORE = "wakeful_before_"
"""Of an attention that does something to keys and values and then calls the one that it names."""


def wrapped_attention_name(own: str, operation: str) -> str:
    """Return what an attention is called that does something, `what`, before it calls `own`."""
    return f"{_BEFORE}{own}_{operation}"


def attention_implementation(model: "PreTrainedModel") -> str | None:
    """Return the name of a model's attention implementation, the inner one where one is before it.

    Where keys and values are rounded for a quantized cache, what is watched are the rounded ones.
    """
    return implementation_in_config(model.config.get_text_config(decoder=True))


def implementation_in_config(config: Any) -> str | None:
    """Return the attention implementation that one configuration names, the inner one as above."""
    name = getattr(config, "_attn_implementation", None)  # absent while one is being made
    if name and name.startswith(_BEFORE):
        return name.removeprefix(_BEFORE).rpartition("_")[0]
    return name
