"""Changes of existing models without training: the same function with other weights."""

from wakeful.surgery.absorb import check_replaceable
from wakeful.surgery.own_sinks import check_own_sinks, fit_own_sinks
from wakeful.surgery.prefix import check_stores, store_prefix
from wakeful.surgery.rotate import check_rotates, rotate, rotate_keys
from wakeful.surgery.rotate_experts import rotate_experts
from wakeful.surgery.sink_tokens import (
    SinkChoice,
    SinkTrial,
    by_preference,
    choose_sink_tokens,
    free_share,
    losses_after_opening,
    prepend_tokens,
    race_tokens,
)
from wakeful.surgery.sinks import learned_sinks

__all__ = [
    "SinkChoice",
    "SinkTrial",
    "by_preference",
    "check_own_sinks",
    "check_replaceable",
    "check_rotates",
    "check_stores",
    "choose_sink_tokens",
    "fit_own_sinks",
    "free_share",
    "learned_sinks",
    "losses_after_opening",
    "prepend_tokens",
    "race_tokens",
    "rotate",
    "rotate_experts",
    "rotate_keys",
    "store_prefix",
]
