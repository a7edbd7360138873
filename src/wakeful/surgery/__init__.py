"""What is done to a model that exists, without training: the same function in other weights."""

from wakeful.surgery.gates import check_gates, open_gates
from wakeful.surgery.prefix import choose_prefix, store_prefix
from wakeful.surgery.rotate import check_rotates, rotate
from wakeful.surgery.sinks import check_sinks, learned_sinks

__all__ = [
    "check_gates",
    "check_rotates",
    "check_sinks",
    "choose_prefix",
    "learned_sinks",
    "open_gates",
    "rotate",
    "store_prefix",
]
