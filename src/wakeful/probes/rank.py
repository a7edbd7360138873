"""Attention collapse: the ranks of heads, and layers that are lazy."""

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import polars as pl
import torch

from wakeful.errors import WakefulError
from wakeful.probes.base import SCHEMA, AttentionEvent, Frame, MeanProbe, RowKey
from wakeful.probes.certificates import (
    RankBounds,
    column_bounds,
    mass_columns,
    matrix_rank,
    top_columns_bounds,
)
from wakeful.probes.streaming import AttentionInputs, TileStatistics, head_weights

_T = TypeVar("_T")


class Ranks(MeanProbe):
    """`rank` and `mass_columns` of every head, `lazy` layers (When Attention Collapses, section 2).

    rank is min k: Σ_{i≤k} σ_i² ≥ τ Σ σ_i². A head's row is its mean over sequences and the layer's
    row the largest of its heads' (the paper). `mass_columns` is the least number of columns with τ
    of ‖A‖_F²; the layer's row is the mean over heads. `lazy` is 1 where the layer's rank is at most
    `lazy_rank`, and `near_rank_1` counts such heads.

    Past `max_tokens` a sequence, or once `seconds` have been spent, ranks that cheap certificates
    do not settle are reported as bounds: the row's kind is "bound", its value the upper one, and a
    row of variant `at_least` has the lower; `lazy` and `near_rank_1` then count what is proved.
    Rows do not carry τ: give a watch one `Ranks`.
    """

    def __init__(
        self,
        *,
        tau: float = 0.9,
        lazy_rank: float = 2.0,
        max_tokens: int = 2048,
        seconds: float = math.inf,
    ) -> None:
        if not 0 < tau < 1:
            raise WakefulError(f"tau is {tau}: it is a fraction of the energy, between 0 and 1")
        super().__init__()
        self.tau = tau
        self.lazy_rank = lazy_rank
        self.max_tokens = max_tokens
        self.seconds = seconds
        self.spent = 0.0

    def see_attention(self, event: AttentionEvent) -> None:
        """Add every head's rank, or its bounds once `seconds` are spent."""
        for sequence, statistics in zip(event.sequences, event.statistics, strict=True):
            started = time.perf_counter()
            for head, bounds in enumerate(self.bounds(sequence, statistics)):
                self._put(event.layer, head, bounds)
            columns = mass_columns(statistics.column_energy, self.tau).double()
            self.put_heads(event.layer, "mass_columns", columns)
            self.spent += time.perf_counter() - started

    def bounds(self, sequence: AttentionInputs, statistics: TileStatistics) -> list[RankBounds]:
        """Return bounds of every head's rank, equal where it is known."""
        all_bounds = column_bounds(
            statistics.column_sums, statistics.column_energy, statistics.largest_row_sum, self.tau
        )
        started = time.perf_counter()

        def tighten(head: int) -> RankBounds:
            if self.spent + time.perf_counter() - started > self.seconds:
                return all_bounds[head]
            if sequence.length > self.max_tokens:
                energy = statistics.column_energy[head]
                return all_bounds[head].meet(top_columns_bounds(sequence, head, energy, self.tau))
            A = head_weights(sequence, head)
            rank = matrix_rank(A, self.tau, causal=sequence.keep is None)
            return RankBounds(rank, rank)

        unknown = [head for head, bounds in enumerate(all_bounds) if not bounds.closed]
        for head, bounds in zip(
            unknown, map_heads(tighten, unknown, statistics.column_energy.device), strict=True
        ):
            all_bounds[head] = bounds
        return all_bounds

    def _put(self, layer: int, head: int, bounds: RankBounds) -> None:
        for metric, value, bound in (
            ("rank", bounds.high, not bounds.closed),
            ("rank_at_least", bounds.low, False),
        ):
            self.add(RowKey(layer, head, "all", metric, "paper"), value, bound=bound)

    def rows(self) -> Frame:
        """Return ranks by head, then by layer; a rank that is a bound has its lower bound too."""
        rows = super().rows()
        heads = rows.filter(metric="rank")
        open_heads = heads.filter(pl.col("kind") == "bound")
        at_least = rows.filter(metric="rank_at_least").join(
            open_heads, on=["layer", "head"], how="semi", maintain_order="left"
        )
        frames = [
            heads,
            at_least.with_columns(
                metric=pl.lit("rank"), variant=pl.lit("at_least"), kind=pl.lit("bound")
            ),
            rows.filter(metric="mass_columns"),
        ]
        frames += [self._layer(layer) for _, layer in heads.group_by("layer", maintain_order=True)]
        return pl.concat([pl.DataFrame(schema=SCHEMA), *frames])

    def _layer(self, heads: Frame) -> Frame:
        """Return a layer's rows from its heads': largest rank, lazy or not, heads near rank 1."""
        largest = heads.sort("value").tail(1).row(0, named=True)
        kind = "bound" if (heads["kind"] == "bound").any() else "exact"
        lazy = float(largest["value"] <= self.lazy_rank)
        near = float((heads["value"] <= self.lazy_rank).sum())
        shared = (largest["layer"], None, "all")
        rows = [
            (*shared, "rank", "paper", largest["value"], largest["standard_error"], kind),
            (*shared, "lazy", "paper", lazy, None, kind),
            (*shared, "near_rank_1", "paper", near, None, kind),
        ]
        return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def map_heads(do: Callable[[int], _T], heads: Iterable[int], device: torch.device) -> list[_T]:
    """Return `do` of each head, in order.

    On a CPU as many heads at a time as torch has threads, since a decomposition gains little from a
    second thread; elsewhere one by one.
    """
    heads, threads = list(heads), torch.get_num_threads() if device.type == "cpu" else 1
    if threads == 1 or len(heads) < 2:
        return [do(head) for head in heads]
    inference, graph = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def run(head: int) -> _T:
        # A thread begins with torch's own modes and as many threads as torch may have.
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.set_grad_enabled(graph):
            return do(head)

    with ThreadPoolExecutor(min(threads, len(heads))) as pool:
        try:
            return list(pool.map(run, heads))
        finally:
            torch.set_num_threads(threads)  # what threads yet to come begin with
