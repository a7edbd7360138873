"""What is done to a model that exists, without training: the same function in other weights."""

from wakeful.surgery.absorb import check_absorbs
from wakeful.surgery.gates import learned_gates, open_gates
from wakeful.surgery.prefix import choose_prefix, store_prefix
from wakeful.surgery.rotate import Bases, check_rotates, rotate, rotate_keys
from wakeful.surgery.rotate_experts import rotate_experts
from wakeful.surgery.sinks import learned_sinks

__all__ = [
    "Bases",
    "check_absorbs",
    "check_rotates",
    "choose_prefix",
    "learned_gates",
    "learned_sinks",
    "open_gates",
    "rotate",
    "rotate_experts",
    "rotate_keys",
    "store_prefix",
]
