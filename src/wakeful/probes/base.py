"""Base classes of probes, and the events that they receive.

Shapes: B batch, L tokens, H query heads, G key/value heads, d head width, D model width.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.estimates import error_of_mean
from wakeful.model.finite import check_finite, widened
from wakeful.probes import exact
from wakeful.probes.streaming import AttentionInputs, TileStatistics, Weigh, tile_statistics

Frame: TypeAlias = pl.DataFrame
"""Tidy rows with the columns of `SCHEMA`."""

SCHEMA = {
    "layer": pl.Int64,
    "head": pl.Int64,  # null: the layer as a whole
    "position": pl.String,  # "first", "rest", "all", or a number where the metric has one
    "metric": pl.String,
    "variant": pl.String,  # "paper", "code", or what the metric's own docstring names
    "value": pl.Float64,
    "standard_error": pl.Float64,  # over sequences; null for a single one
    "kind": pl.String,  # "exact", or "bound" where an upper bound is all that is known
}


@dataclass(frozen=True)
class AttentionEvent:
    """The heads of one layer just before attention, positions already applied.

    `valid` says which tokens are real (None: all); `window` = W lets a query see itself and the
    W − 1 tokens before it; `keep` (B or 1, L, L) replaces causality and window by explicit pairs;
    `softcap` = c replaces a logit x by c·tanh(x / c); `sink` is s for each head, or for each
    query and head, the logarithm of what softmax-1 adds to the denominator. `before` are keys of a
    stored prefix, which all queries see: what they take is missing from the rows, as what a sink
    takes is.
    `weigh` makes the weights of logits where they are not a softmax with such a sink.

    `unseen` says why the weights are not one L × L matrix, where they are not: a probe that asks
    for them is refused with that reason.
    With `heads_per_value` = n, each group of n heads shares the concatenated values of all n.
    """

    layer: int
    q: Float[Tensor, "B H L d"]
    k: Float[Tensor, "B G L d"]
    v: Float[Tensor, "B G L dv"]
    scale: float
    window: int | None = None
    softcap: float | None = None
    sink: Float[Tensor, "*queries H"] | None = None
    before: Float[Tensor, "G P d"] | None = None
    weigh: Weigh | None = None
    valid: Bool[Tensor, "B L"] | None = None
    keep: Bool[Tensor, "#B L L"] | None = None
    unseen: str = ""
    heads_per_value: int = 1

    @cached_property
    def sequences(self) -> list[AttentionInputs]:
        """The sequences of the batch one by one, without padding.

        Raises:
            WakefulError: `unseen` gives a reason why the weights are not one matrix.
        """
        if self.unseen:
            raise WakefulError(self.unseen)
        return [self._sequence(b) for b in range(self.q.shape[0])]

    @cached_property
    def statistics(self) -> list[TileStatistics]:
        """The tile pass over each sequence, made once however many probes ask."""
        return [tile_statistics(sequence) for sequence in self.sequences]

    def _sequence(self, b: int) -> AttentionInputs:
        """Return the inputs of attention of sequence `b` of the batch, without its padding.

        The fields `sink` and `keep` may have one entry for the whole batch or one for each
        sequence. The stored prefix `before` is the same for all sequences.

        Raises:
            WakefulError: the sequence is all padding, or q, k or v are not finite.
        """
        q, k, v = self.q[b], self.k[b], self.v[b]
        window, keep, sink = self.window, None, self.sink
        if sink is not None and sink.dim() == 3:  # (B, L, H): a sink for each query
            sink = sink[b]
        if self.keep is not None:
            keep = self.keep[b if self.keep.shape[0] > 1 else 0]
        if self.valid is not None and not bool(self.valid[b].all()):
            real = self.valid[b].nonzero().squeeze(1)
            if len(real) == 0:
                raise WakefulError(f"sequence {b} of the batch is all padding")
            q, k, v = q[:, real], k[:, real], v[:, real]
            if sink is not None and sink.dim() == 2:
                sink = sink[real]
            if keep is not None:
                keep = keep[real][:, real]
            padding_inside = int(real[-1] - real[0]) + 1 != len(real)
            if padding_inside and keep is None and window is not None:
                # A window counts padding too, so it is no longer a width in real tokens.
                distance = real.unsqueeze(1) - real
                keep = (distance >= 0) & (distance < window)
        if keep is not None:
            window = None  # `keep` replaces it
        check_finite(q, k, v)
        return AttentionInputs(
            q=q, k=k, v=v, scale=self.scale, window=window,
            softcap=self.softcap, sink=sink, prefix_k=self.before, weigh=self.weigh,
            keep=keep, heads_per_value=self.heads_per_value,
        )  # fmt: skip


@dataclass(frozen=True)
class HiddenEvent:
    """The output of a block (0, 1 ...), or the embedding that the first receives (layer −1).

    `before` is the block's input, which differs from the previous block's output if a depth mix
    lies between them.
    """

    layer: int
    h: Float[Tensor, "B L D"]
    valid: Bool[Tensor, "B L"] | None = None
    before: Float[Tensor, "B L D"] | None = None

    @cached_property
    def sequences(self) -> list[Float[Tensor, "L D"]]:
        """Each sequence's hidden states in float32 (float64 stays), padding removed."""
        return self._split(self.h)

    @cached_property
    def inputs(self) -> list[Float[Tensor, "L D"]]:
        """Each sequence's states as the block received them; none for the embedding."""
        return [] if self.before is None else self._split(self.before)

    def _split(self, h: Tensor) -> list[Tensor]:
        """Split hidden states (B, L, D) into sequences without padding, in float32 or wider.

        Raises:
            Diverged: a state is not finite.
        """
        sequences = list(widened(h))
        if self.valid is not None:
            sequences = [states[real] for states, real in zip(sequences, self.valid, strict=True)]
        check_finite(*sequences)
        return sequences


Event: TypeAlias = AttentionEvent | HiddenEvent


class Probe(ABC):
    """Base class of measurements: receives events layer by layer and reports rows."""

    def see(self, event: Event) -> None:
        """Take in an event: one layer's attention or output in one forward pass."""
        if isinstance(event, AttentionEvent):
            self.see_attention(event)
        else:
            self.see_hidden(event)

    def see_attention(self, event: AttentionEvent) -> None:
        """Take in a layer's attention; a probe that has no use for it leaves this out."""
        return None

    def see_hidden(self, event: HiddenEvent) -> None:
        """Take in a block's output or the embedding; a probe that has no use for it leaves this
        out.
        """
        return None

    @abstractmethod
    def rows(self) -> Frame:
        """Return everything seen so far, mean ± standard error over sequences."""


@dataclass(frozen=True, order=True)
class RowKey:
    """Identifying columns of a row: all but the measured numbers."""

    layer: int
    head: int | None
    position: str
    metric: str
    variant: str


class Means:
    """Running means and standard errors, one for each key, by Chan, Golub and LeVeque's update.

    Sums of integers, such as ranks, are exact, so that their means do not depend on the order.
    """

    def __init__(self) -> None:
        self._state: dict[RowKey, tuple[int, float, float]] = {}
        """For each key: count, sum, and sum of squared differences from the mean."""
        self._bounds: set[RowKey] = set()

    def add(self, key: RowKey, value: float, *, bound: bool = False) -> None:
        """Add one sequence's value of `key`. `bound` says that it is only an upper bound; then the
        key's mean is one too.
        """
        # `squares` is the sum of squared differences from the mean; each value updates it.
        count, total, squares = self._state.get(key, (0, 0.0, 0.0))
        if count:
            difference = value - total / count
            squares += difference * difference * count / (count + 1)
        self._state[key] = (count + 1, total + value, squares)
        if bound:
            self._bounds.add(key)

    def rows(self) -> Frame:
        """Return a row (mean, standard error) for each key, sorted by layer, metric, variant,
        position and head. The error of a single value is null.
        """
        rows = []
        for key, (count, total, squares) in self._state.items():
            error = error_of_mean(squares, count) if count > 1 else None
            kind = "bound" if key in self._bounds else "exact"
            rows.append(
                (key.layer, key.head, key.position, key.metric, key.variant, total / count,
                 error, kind)
            )  # fmt: skip
        frame = pl.DataFrame(rows, schema=SCHEMA, orient="row")
        return frame.sort("layer", "metric", "variant", "position", "head", nulls_last=True)


class MeanProbe(Means, Probe):
    """A probe whose rows are means over sequences of numbers it computes an event at a time."""

    def put(
        self,
        layer: int,
        metric: str,
        values: "float | Tensor",
        *,
        variant: str = "paper",
        position: str = "all",
    ) -> None:
        """Add one sequence's value for the layer or, if `values` is a vector, one for each head.

        `variant` and `position` are columns of the rows; see `SCHEMA`.
        """
        if isinstance(values, Tensor) and values.ndim == 1:
            for head, value in enumerate(values.tolist()):
                self.add(RowKey(layer, head, position, metric, variant), value)
        else:
            self.add(RowKey(layer, None, position, metric, variant), float(values))

    def put_heads(self, layer: int, metric: str, per_head: Tensor, **where: str) -> None:
        """Add one number for each head, and their mean for the layer."""
        self.put(layer, metric, per_head, **where)
        self.put(layer, metric, float(per_head.mean()), **where)


def exact_rows(rows: Iterable[tuple[int | None, int | None, str, str, str, float]]) -> Frame:
    """Return a frame of exact values: `SCHEMA`'s columns without the last two, which are filled in
    (no standard error, kind "exact").
    """
    return pl.DataFrame([(*row, None, "exact") for row in rows], schema=SCHEMA, orient="row")


def first_and_rest(h: Float[Tensor, "L *more"]) -> list[tuple[str, Tensor]]:
    """Return ("first", the first token's row) and, if there are more tokens, ("rest", theirs)."""
    return [("first", h[:1]), ("rest", h[1:])][: len(h)]


def block_outputs(rows: Frame) -> Frame:
    """Return the rows of block outputs: all but the embedding's, layer −1."""
    return rows.filter(pl.col("layer") >= 0)


def mean_over_layers(rows: Frame) -> float | None:
    """Return the mean of one metric's rows over block outputs; None if there are no such rows."""
    mean = block_outputs(rows)["value"].mean()
    return mean if isinstance(mean, float) else None


def gather(probes: Iterable[Probe]) -> Frame:
    """Return the rows of several probes in one frame."""
    return pl.concat([pl.DataFrame(schema=SCHEMA), *(probe.rows() for probe in probes)])


Emit = Callable[[Event], None]
"""Function that receives the events of a model's forward passes."""


Visibility = tuple[int | None, Tensor | None]
"""Attention mask: a window, pairs (B or 1, L, L), or causal if both are None."""


def visibility(
    keep: Bool[Tensor, "#B L L"], valid: Bool[Tensor, "B L"] | None, window: int | None
) -> Visibility:
    """Return the simplest description (window, keep) of the mask `keep`: (None, None) if it is
    causal, (window, None) if it is causal in that window, else (None, keep).

    `valid` says which tokens are real (None: all). Causal then means that padding is hidden from
    all queries. Rows of padding queries do not count, because no metric reads them.
    """
    length = keep.shape[-1]
    causal = exact.causal(length, None, keep.device).unsqueeze(0)
    if valid is not None:
        causal = causal & valid.unsqueeze(1)
        # Rows of padding queries are overwritten by what they are compared with.
        keep = torch.where(valid.unsqueeze(2), keep, causal)
    if bool((keep == causal).all()):
        return None, None
    if window is not None:
        windowed = causal & exact.causal(length, window, keep.device)
        compared = keep if valid is None else torch.where(valid.unsqueeze(2), keep, windowed)
        if bool((compared == windowed).all()):
            return window, None
    return None, keep
