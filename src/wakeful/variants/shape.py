"""The few numbers that every part of a decoder has to agree on."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Numbers of layers, heads and channels of a decoder.

    H = `num_heads` query heads, G = `num_kv_heads` key/value heads (G divides H), d = `head_width`
    channels a head, D = `width` channels in the residual stream, N = `num_layers`, V =
    `vocab_size` tokens.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_width: int
    width: int
    vocab_size: int
