"""Groups of layers that an engine multiplies as one matrix, and which therefore share a format.

vLLM refuses two schemes within one of its fused layers, and Transformers reads all experts of a
model in one scheme.
"""

import re
from collections.abc import Iterable

_FUSED = (
    r"[qkv]_proj|[qkv]_lin|query|key|value",  # attention
    r"gate_proj|up_proj|gate|up|w1|w3|wi_[01]",  # gated feed-forward networks
    r"q_a_proj|kv_a_proj_with_mqa",  # DeepSeek's latent attention
    r"in_proj_qkvz|in_proj_ba|in_proj_qkv|in_proj_[zab]",  # gated delta networks
)
"""Patterns of the last parts of layers' names that engines join into one matrix, in any family."""
_EXPERTS = re.compile(r".+\.experts\..+")


def fused_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Group the names of layers that must share one format, in the order of their first layers.

    Those are layers that an engine multiplies as one matrix (a block's queries, keys and values, or
    its gate and up projections), and the experts of all blocks. Every other layer is a group by
    itself.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        fused = next((pattern for pattern in _FUSED if re.fullmatch(pattern, leaf)), None)
        if _EXPERTS.fullmatch(name):
            key = ("experts", "")
        elif fused is not None:
            key = (parent, fused)
        else:
            key = (name, "")
        groups.setdefault(key, []).append(name)
    return [tuple(group) for group in groups.values()]
