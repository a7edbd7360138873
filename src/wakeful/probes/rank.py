"""Attention collapse: the ranks of heads, and layers that are lazy."""

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

    Past `max_tokens` a sequence, ranks that cheap certificates do not settle are reported as
    bounds: the row's kind is "bound", its value the upper one, and a row of variant `at_least` has
    the lower; `lazy` and `near_rank_1` then count what is proved.
    Rows do not carry τ: give a watch one `Ranks`.
    """

    def __init__(self, *, tau: float = 0.9, lazy_rank: float = 2.0, max_tokens: int = 2048) -> None:
        """Store the options, which the class describes.

        Raises:
            WakefulError: tau is not between 0 and 1.
        """
        if not 0 < tau < 1:
            raise WakefulError(f"tau is {tau}: it is a fraction of the energy, between 0 and 1")
        super().__init__()
        self.tau = tau
        self.lazy_rank = lazy_rank
        self.max_tokens = max_tokens

    def see_attention(self, event: AttentionEvent) -> None:
        """Add every head's rank and mass columns."""
        for sequence, statistics in zip(event.sequences, event.statistics, strict=True):
            for head, bounds in enumerate(self.bounds(sequence, statistics)):
                self._put(event.layer, head, bounds)
            columns = mass_columns(statistics.column_energy, self.tau).double()
            self.put_heads(event.layer, "mass_columns", columns)

    def bounds(self, sequence: AttentionInputs, statistics: TileStatistics) -> list[RankBounds]:
        """Return bounds of every head's rank; both are the rank where it is known.

        The sums in `statistics` bound all ranks. A rank that they do not settle is computed, or in
        a sequence of more than `max_tokens` bounded more tightly.
        """
        all_bounds = column_bounds(
            statistics.column_sums, statistics.column_energy, statistics.largest_row_sum, self.tau
        )

        def tighten(head: int) -> RankBounds:
            """Return a head's rank, or the best bounds that the length allows."""
            if sequence.length > self.max_tokens:
                energy = statistics.column_energy[head]
                return all_bounds[head].meet(top_columns_bounds(sequence, head, energy, self.tau))
            A = head_weights(sequence, head)
            rank = matrix_rank(A, self.tau, causal=sequence.keep is None)
            return RankBounds(rank, rank)

        open_heads = [head for head, bounds in enumerate(all_bounds) if not bounds.closed]
        tightened = map_heads(tighten, open_heads, statistics.column_energy.device)
        for head, bounds in zip(open_heads, tightened, strict=True):
            all_bounds[head] = bounds
        return all_bounds

    def _put(self, layer: int, head: int, bounds: RankBounds) -> None:
        """Add one sequence's bounds of a head's rank: the upper one as metric `rank`, the lower one
        as `rank_at_least`.
        """
        upper = RowKey(layer, head, "all", "rank", "paper")
        lower = RowKey(layer, head, "all", "rank_at_least", "paper")
        self.add(upper, bounds.high, bound=not bounds.closed)
        self.add(lower, bounds.low)

    def rows(self) -> Frame:
        """Return the heads' ranks, then all rows of mass columns, then the layers' rows. A head
        whose rank is only bounded also has a row of its lower bound, variant "at_least".
        """
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
        heads_by_layer = heads.group_by("layer", maintain_order=True)
        frames += [self._layer_rows(layer_heads) for _, layer_heads in heads_by_layer]
        return pl.concat([pl.DataFrame(schema=SCHEMA), *frames])

    def _layer_rows(self, heads: Frame) -> Frame:
        """Return one layer's rows from the rows of its heads' ranks: the largest rank, whether the
        layer is lazy (1 or 0), and the number of heads near rank 1.
        """
        largest = heads.sort("value").tail(1).row(0, named=True)
        kind = "bound" if (heads["kind"] == "bound").any() else "exact"
        is_lazy = float(largest["value"] <= self.lazy_rank)
        num_near = float((heads["value"] <= self.lazy_rank).sum())
        columns = (largest["layer"], None, "all")  # layer, head, position
        rows = [
            (*columns, "rank", "paper", largest["value"], largest["standard_error"], kind),
            (*columns, "lazy", "paper", is_lazy, None, kind),
            (*columns, "near_rank_1", "paper", num_near, None, kind),
        ]
        return pl.DataFrame(rows, schema=SCHEMA, orient="row")


def map_heads(do: Callable[[int], _T], heads: Iterable[int], device: torch.device) -> list[_T]:
    """Return the results of `do` for each head, in order.

    On a CPU as many heads run at a time as torch has threads, since a decomposition gains little
    from a second thread; on other devices one by one.
    """
    heads = list(heads)
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    if threads == 1 or len(heads) < 2:
        return [do(head) for head in heads]
    inference, grad = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    def run(head: int) -> _T:
        # A new thread does not have the caller's modes and number of threads, but the defaults.
        torch.set_num_threads(1)
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return do(head)

    with ThreadPoolExecutor(min(threads, len(heads))) as pool:
        try:
            return list(pool.map(run, heads))
        finally:
            torch.set_num_threads(threads)  # the 1 above also became the default of new threads
