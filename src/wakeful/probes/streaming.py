"""Statistics of attention weights, a tile of queries at a time: never an L × L matrix for a head.

Weights that are not a softmax are the exception: they are made whole, by their definition.

Shapes: H query heads, G key/value heads, R = H / G queries heads a key head, L tokens, d head
width, r queries of a tile, n keys that a tile sees.

A tile holds whole rows (causality and windows cut the keys it needs), so its softmax is complete
and no log-sum-exp from elsewhere is needed: reusing the fused kernel's would save one pass of
three over a tile in cache, and running that kernel again to get it costs more than the tiles do.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.model.attend import Weigh
from wakeful.model.finite import widened
from wakeful.probes import exact

LONGEST_WHOLE = 4096
"""Most tokens of a sequence whose weights are made whole: a gigabyte for 16 heads."""
_TILE_ELEMENTS = 1 << 17
"""Weights a tile holds at most: half a megabyte in float32, which stays in a core's cache."""


@dataclass(frozen=True)
class AttentionInputs:
    """Inputs of the attention weights of one sequence; see `AttentionEvent`.

    `prefix_k` are a stored prefix's keys, which all queries see.
    """

    q: Float[Tensor, "H L d"]
    k: Float[Tensor, "G L d"]
    v: Float[Tensor, "G L dv"]
    scale: float
    window: int | None = None
    softcap: float | None = None
    sink: Float[Tensor, "*L H"] | None = None
    prefix_k: Float[Tensor, "G P d"] | None = None
    weigh: Weigh | None = None
    keep: Bool[Tensor, "L L"] | None = None
    heads_per_value: int = 1

    @property
    def values(self) -> Float[Tensor, "G L _"]:
        """The values of each key/value head, in float32 or wider.

        With n = `heads_per_value`, each head of a group of n has the values of the whole group in
        `v`, concatenated. The group's first head is split into the values of n heads.
        """
        v = widened(self.v)[:: self.heads_per_value]
        return v.unflatten(-1, (self.heads_per_value, -1)).transpose(1, 2).flatten(0, 1)

    @property
    def length(self) -> int:
        """L, the tokens of the sequence."""
        return self.q.shape[1]

    @property
    def num_heads(self) -> int:
        """H, the query heads."""
        return self.q.shape[0]

    @cached_property
    def by_definition(self) -> Float[Tensor, "H L S"]:
        """Every head's whole L × S weights, computed by `weigh`. The first of the S keys are those
        of a stored prefix, if there is one.

        Raises:
            WakefulError: the sequence has more than `LONGEST_WHOLE` tokens.
        """
        check_whole_length(self.length)
        k, keep = self.k, self.keep
        if keep is None:
            keep = exact.causal(self.length, self.window, self.q.device)
        if self.prefix_k is not None:  # which all queries see
            k = torch.cat([self.prefix_k, k], 1)
            keep = torch.cat([keep.new_ones(len(keep), self.prefix_k.shape[1]), keep], 1)
        return exact.attention_weights(
            widened(self.q), widened(k), scale=self.scale, softcap=self.softcap, keep=keep,
            weigh=self.weigh,
        )  # fmt: skip


def check_whole_length(length: int) -> None:
    """Raise `WakefulError` if a sequence has too many tokens to hold its L × L attention weights
    whole. Only weights that are not a softmax need that; others are computed tile by tile.
    """
    if length > LONGEST_WHOLE:
        raise WakefulError(
            f"attention weights that are not a softmax are seen whole, in sequences of up to "
            f"{LONGEST_WHOLE} tokens, and this one has {length}: take shorter ones"
        )


@dataclass(frozen=True)
class Tile:
    """Weights of some heads' queries [first_query, end_query) on keys [first_key, end_key)."""

    first_query: int
    end_query: int
    first_key: int
    end_key: int
    weights: Float[Tensor, "R r n"]
    stored: Float[Tensor, "R r P"] | None = None
    """Weights of the same queries on a stored prefix's keys."""


@dataclass(frozen=True)
class TileStatistics:
    """Everything about one sequence's weights p that one pass over tiles gives.

    Sums are float64; they were added up in float32 within a tile.
    """

    column_sums: Float[Tensor, "H L"]
    """c1_j = Σ_i p_ij: L times the token importance."""
    column_energy: Float[Tensor, "H L"]
    """c2_j = Σ_i p_ij²: its sum is ‖A‖_F²."""
    largest_row_sum: Float[Tensor, "H"]
    """max_i Σ_j p_ij: 1 without a sink."""
    row_0_mass: Float[Tensor, "H"]
    """p_00: 1 without a sink."""
    first_key_rows: Float[Tensor, "H"]
    """The number of queries whose largest weight, a stored prefix included, is key 0 alone."""
    row_0_dominated: Float[Tensor, "H"]
    """1 if query 0 is one of `first_key_rows`, else 0."""
    leading_rows: Float[Tensor, "H L"]
    """The number of queries whose largest weight, a stored prefix included, is key j: the first of
    several equal ones, so that even attention leads to key 0."""
    stored_mass: Float[Tensor, "H"] | None
    """Σ of the weights on a stored prefix's keys, None where there is none."""

    @property
    def importance(self) -> Float[Tensor, "H L"]:
        """a_j = c1_j / L."""
        return self.column_sums / self.column_sums.shape[-1]


def tile_statistics(heads: AttentionInputs) -> TileStatistics:
    """Return the statistics of every head in O(H·L) memory and O(H·L²·d) work: in one pass over
    tiles, none of which is kept.

    A tile has all keys that its queries see, so that a maximum over its keys is one over all.
    """
    num_heads, length = heads.num_heads, heads.length
    repeats = num_heads // heads.k.shape[0]  # query heads that share a key head
    device = heads.q.device
    # Rows of a plain softmax sum to 1, and need not be summed.
    sums_to_1 = all(
        option is None for option in (heads.sink, heads.prefix_k, heads.weigh, heads.keep)
    )
    column_sums = torch.zeros(num_heads, length, dtype=torch.float64, device=device)
    column_energy, leading = torch.zeros_like(column_sums), torch.zeros_like(column_sums)
    largest_row_sum, row_0_mass, first_key_rows, row_0_dominated, stored = (
        torch.zeros(num_heads, dtype=torch.float64, device=device) for _ in range(5)
    )
    for group in range(heads.k.shape[0]):
        group_heads = slice(group * repeats, (group + 1) * repeats)
        for tile in tiles(heads, range(group_heads.start, group_heads.stop)):
            p = tile.weights
            highest, key = p.max(-1)
            # A query leads for the key of its largest weight. It leads for none if it sees no key,
            # or if a stored key has as large a weight.
            leads = highest > (0 if tile.stored is None else tile.stored.amax(-1))
            leading[group_heads].scatter_add_(1, tile.first_key + key, leads.double())
            if tile.first_key == 0:  # a window may hide key 0 from later tiles
                dominated = p[..., 0] > 0  # queries that weigh key 0 more than any other key
                for others in (p[..., 1:], tile.stored):
                    if others is not None and others.shape[-1]:
                        dominated &= p[..., 0] > others.amax(-1)
                first_key_rows[group_heads] += dominated.sum(-1)
                if tile.first_query == 0:
                    row_0_mass[group_heads] = p[:, 0, 0].double()
                    row_0_dominated[group_heads] = dominated[:, 0].double()
            if not sums_to_1:
                largest_row_sum[group_heads] = torch.maximum(
                    largest_row_sum[group_heads], p.sum(-1).amax(-1).double()
                )
            if tile.stored is not None:
                stored[group_heads] += tile.stored.sum((1, 2))
            keys = slice(tile.first_key, tile.end_key)
            column_sums[group_heads, keys] += p.sum(1)
            # In place: these weights are not needed any more.
            column_energy[group_heads, keys] += p.square_().sum(1)
    if sums_to_1:
        largest_row_sum.fill_(1.0)
    return TileStatistics(
        column_sums=column_sums,
        column_energy=column_energy,
        largest_row_sum=largest_row_sum,
        row_0_mass=row_0_mass,
        first_key_rows=first_key_rows,
        row_0_dominated=row_0_dominated,
        leading_rows=leading,
        stored_mass=None if heads.prefix_k is None else stored,
    )


def head_weights(
    heads: AttentionInputs, head: int, tokens: int | None = None
) -> Float[Tensor, "size size"]:
    """Return one head's weights of the first `tokens` queries on the first `tokens` keys (None: of
    all). Each row is cut from the softmax over all keys that its query sees.
    """
    size = heads.length if tokens is None else min(tokens, heads.length)
    dtype = torch.promote_types(heads.q.dtype, torch.float32)
    A = torch.zeros(size, size, dtype=dtype, device=heads.q.device)
    for tile in tiles(heads, range(head, head + 1)):
        end_query, end_key = min(tile.end_query, size), min(tile.end_key, size)
        A[tile.first_query : end_query, tile.first_key : end_key] = tile.weights[
            0, : end_query - tile.first_query, : end_key - tile.first_key
        ]
        if tile.end_query >= size:  # later tiles have later queries alone
            break
    return A


def first_column(heads: AttentionInputs) -> Float[Tensor, "H L"]:
    """Return every head's and query's weight on key 0, in float64."""
    repeats = heads.num_heads // heads.k.shape[0]  # query heads that share a key head
    column = torch.zeros(heads.num_heads, heads.length, dtype=torch.float64, device=heads.q.device)
    for start in range(0, heads.num_heads, repeats):
        for tile in tiles(heads, range(start, start + repeats)):
            if tile.first_key == 0:  # a window may hide key 0 from later tiles
                column[start : start + repeats, tile.first_query : tile.end_query] = tile.weights[
                    ..., 0
                ]
    return column


def tiles(heads: AttentionInputs, chosen: range) -> Iterator[Tile]:
    """Yield the attention weights of the query heads `chosen`, which share one key head, for one
    block of queries after another.

    The softmax includes the sink, which a tile leaves out: with a sink, the rows of a tile sum to
    less than 1. All tiles share one buffer. A caller may overwrite a tile, and must not keep it.
    """
    R = len(chosen)
    if heads.weigh is not None:  # not a softmax: all queries are one tile
        weights = heads.by_definition[chosen.start : chosen.stop].clone()
        num_stored = weights.shape[-1] - heads.length
        on_prefix = weights[..., :num_stored] if num_stored else None
        yield Tile(0, heads.length, 0, heads.length, weights[..., num_stored:], on_prefix)
        return
    group = chosen.start // (heads.num_heads // heads.k.shape[0])
    q = widened(heads.q[chosen.start : chosen.stop]) * heads.scale
    k = heads.k[group].to(q.dtype).T.contiguous()
    prefix_k = None if heads.prefix_k is None else heads.prefix_k[group].to(q.dtype).T
    sink = None if heads.sink is None else heads.sink[..., chosen.start : chosen.stop].to(q.dtype)
    num_stored = 0 if prefix_k is None else prefix_k.shape[1]
    extra = num_stored + (0 if sink is None else 1)
    height = _tile_height(heads, R)
    # A row: the logits of the n keys that the block sees, of the stored keys, and of the sink.
    buffer = q.new_empty(R * height * (heads.length + extra))
    is_later = torch.ones(height, height, dtype=torch.bool, device=q.device).triu(1)
    for first_query in range(0, heads.length, height):
        end_query = min(first_query + height, heads.length)
        first_key, end_key = _visible_keys(heads, first_query, end_query)
        r, n = end_query - first_query, end_key - first_key
        rows = buffer[: R * r * (n + extra)].view(R * r, n + extra)
        queries = q[:, first_query:end_query].reshape(R * r, -1)
        torch.mm(queries, k[:, first_key:end_key], out=rows[:, :n])
        if prefix_k is not None:
            torch.mm(queries, prefix_k, out=rows[:, n : n + num_stored])
        rows = rows.view(R, r, n + extra)
        logits = rows[..., :n]
        if heads.softcap is not None:
            logits.div_(heads.softcap).tanh_().mul_(heads.softcap)
        _mask_logits(logits, heads, first_query, first_key, is_later)
        if sink is not None:
            # One number for each head, or one for each query and head.
            sink_of_rows = sink.unsqueeze(1) if sink.dim() == 1 else sink[first_query:end_query].T
            rows[..., -1] = sink_of_rows
        weights = torch.softmax(rows, -1, out=rows)
        if heads.keep is not None and not extra:
            # A query that sees nothing has zero weights. It always sees a stored key or a sink.
            weights.nan_to_num_(nan=0.0)
        on_prefix = weights[..., n : n + num_stored] if num_stored else None
        yield Tile(first_query, end_query, first_key, end_key, weights[..., :n], on_prefix)


def _tile_height(heads: AttentionInputs, num_heads: int) -> int:
    """Return how many queries a tile of `num_heads` heads takes: 32 to 128 in steps of 16, so that
    it has about `_TILE_ELEMENTS` weights.
    """
    widest = heads.length  # most keys that a tile sees
    if heads.window is not None:
        widest = min(heads.length, heads.window + 128)
    height = max(32, min(128, _TILE_ELEMENTS // (num_heads * widest)))
    return math.ceil(height / 16) * 16


def _visible_keys(heads: AttentionInputs, first_query: int, end_query: int) -> tuple[int, int]:
    """Return (first, end): queries [first_query, end_query) see no keys outside [first, end)."""
    if heads.keep is not None:  # an explicit mask may show any key
        return 0, heads.length
    first = 0 if heads.window is None else max(0, first_query - heads.window + 1)
    return first, end_query


def _mask_logits(
    logits: Float[Tensor, "R r n"],
    heads: AttentionInputs,
    first_query: int,
    first_key: int,
    is_later: Bool[Tensor, "size size"],
) -> None:
    """Set a tile's logits to -inf, in place, where a query does not see a key.

    The tile's r queries begin at `first_query`, its n keys at `first_key`. `is_later` (query, key)
    is True above the diagonal: among tokens that are both, a key after its query.
    """
    r, n = logits.shape[-2:]
    end_query, end_key = first_query + r, first_key + n
    if heads.keep is not None:
        visible = heads.keep[first_query:end_query, first_key:end_key]
        logits.masked_fill_(~visible, -math.inf)
        return
    logits[..., first_query - first_key :].masked_fill_(is_later[:r, :r], -math.inf)
    if heads.window is not None and end_query > heads.window:  # earlier queries see all before them
        query = torch.arange(first_query, end_query, device=logits.device).unsqueeze(1)
        key = torch.arange(first_key, end_key, device=logits.device)
        logits.masked_fill_(key <= query - heads.window, -math.inf)
