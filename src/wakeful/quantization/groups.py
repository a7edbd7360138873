"""Layers that an engine multiplies as one matrix, which therefore take one format.

vLLM refuses two schemes within one of its fused layers, and Transformers reads all experts of a
model by one.
"""

import re
from collections.abc import Iterable

_FUSED = (
    r"[qkv]_proj|[qkv]_lin|query|key|value",  # attention
    r"gate_proj|up_proj|gate|up|w1|w3|wi_[01]",  # gated feed-forward networks
    r"q_a_proj|kv_a_proj_with_mqa",  # DeepSeek's latent attention
    r"in_proj_qkvz|in_proj_ba|in_proj_qkv|in_proj_[zab]",  # gated delta networks
)
"""Last parts of names that one engine's matrix holds together, over all families."""
_EXPERTS = re.compile(r".+\.experts\..+")


def fused_groups(names: Iterable[str]) -> list[tuple[str, ...]]:
    """Return layers' names in groups of one format each, in the order of their first layers.

    They are a block's queries, keys and values; its gate and up; and the experts of all blocks. Any
    other layer is a group by itself.
    """
    groups: dict[tuple[str, int], list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        if _EXPERTS.fullmatch(name):
            key = "experts", -1
        else:
            kinds = (n for n, kind in enumerate(_FUSED) if re.fullmatch(kind, leaf))
            kind = next(kinds, None)
            key = (name, -1) if kind is None else (parent, kind)
        groups.setdefault(key, []).append(name)
    return [tuple(group) for group in groups.values()]
