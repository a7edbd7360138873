"""Changes of existing models without training: the same function with other weights."""

from wakeful.surgery.prefix import check_stores, store_prefix
from wakeful.surgery.rotate import check_rotates, rotate, rotate_keys
from wakeful.surgery.rotate_experts import rotate_experts
from wakeful.surgery.rounding import round_changed
from wakeful.surgery.sink_tokens import (
    SinkChoice,
    SinkTrial,
    choose_sink_tokens,
    free_share,
    losses_after_opening,
    prepend_tokens,
)
from wakeful.surgery.sinks import check_replaceable, learned_sinks

__all__ = [
    "SinkChoice",
    "SinkTrial",
    "check_replaceable",
    "check_rotates",
    "check_stores",
    "choose_sink_tokens",
    "free_share",
    "learned_sinks",
    "losses_after_opening",
    "prepend_tokens",
    "rotate",
    "rotate_experts",
    "rotate_keys",
    "round_changed",
    "store_prefix",
]
