"""Probes of attention: sinks, importance and its entropy, values, and the first token's role."""

from collections.abc import Sequence
from typing import ClassVar

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wakeful.probes import exact
from wakeful.probes.base import SCHEMA, AttentionEvent, Frame, MeanProbe, Probe
from wakeful.probes.streaming import first_column, head_weights


class Sinks(MeanProbe):
    """Share of attention that goes to the first token (From Attention to Activation, sections 3.1
    and 5).

    `first_key_share_…` is the fraction of (query, head) pairs whose largest weight is key 0,
    `first_key_mass_…` the mean weight on key 0. Row 0 sees key 0 alone, so it always counts: the
    names end in `with_row_0` (over all rows) or `without_row_0`. `stored_prefix_mass` is the mean
    weight on a stored prefix's keys, where a model has one. Rows for each head, and for the layer
    the mean over heads.
    """

    def see_attention(self, event: AttentionEvent) -> None:
        """Add every head's share and mass of the first key, with and without query 0 (row 0), which
        sees that key alone, and its mass on a stored prefix if there is one.
        """
        for statistics in event.statistics:
            length = statistics.column_sums.shape[-1]
            mass_on_key_0 = statistics.column_sums[:, 0]
            mass_on_prefix = statistics.stored_mass
            if mass_on_prefix is not None:
                self.put_heads(event.layer, "stored_prefix_mass", mass_on_prefix / length)
            metrics = [
                ("first_key_share", statistics.first_key_rows, statistics.row_0_dominated),
                ("first_key_mass", mass_on_key_0, statistics.row_0_mass),
            ]
            for metric, total, of_row_0 in metrics:
                values = {f"{metric}_with_row_0": total / length}
                if length > 1:
                    values[f"{metric}_without_row_0"] = (total - of_row_0) / (length - 1)
                for name, per_head in values.items():
                    self.put_heads(event.layer, name, per_head)


class KeyShares(Probe):
    """Share of the attention that goes to each key of each sequence, over all heads and layers.

    They are no metric: `shares` and `masses` have them. `wakeful.diagnosis.later_sinks` sums them
    by token.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, Float[Tensor, "2 L"]]] = []
        """For each sequence: the number of layers seen, and the sums over them of the share and the
        mass of each key."""
        self._last_layer = -1
        self._first_sequence = 0
        """Index in `_sums` of the first sequence of the running forward pass."""

    def see_attention(self, event: AttentionEvent) -> None:
        """Add this layer's share and mass of each key, averaged over heads, to each sequence's
        sums. Query 0, which sees key 0 alone, is left out unless it is the only one.
        """
        # Layers run in order: one that is not later than the last begins a new forward pass.
        if event.layer <= self._last_layer or not self._sums:
            self._first_sequence = len(self._sums)
            nothing_seen = (0, torch.zeros(2, 0))  # the first layer's sums replace the tensor
            self._sums += [nothing_seen] * len(event.statistics)
        self._last_layer = event.layer
        for index, statistics in enumerate(event.statistics, start=self._first_sequence):
            length = statistics.column_sums.shape[-1]
            # For each head and key: queries whose largest weight is on the key, and all weights.
            leading, mass = statistics.leading_rows.clone(), statistics.column_sums.clone()
            if length > 1:
                leading[:, 0] -= statistics.row_0_dominated
                mass[:, 0] -= statistics.row_0_mass
            num_queries = max(1, length - 1)
            sums = torch.stack([leading.mean(0), mass.mean(0)]).cpu() / num_queries
            layers, previous = self._sums[index]
            self._sums[index] = layers + 1, sums if layers == 0 else previous + sums

    @property
    def shares(self) -> list[Float[Tensor, "L"]]:
        """For each sequence, by key: the fraction of (query, head, layer) triples, query 0 left
        out, whose largest weight is on that key.
        """
        return [sums[0] / layers for layers, sums in self._sums]

    @property
    def masses(self) -> list[Float[Tensor, "L"]]:
        """For each sequence the mean weight on each key, query 0 left out."""
        return [sums[1] / layers for layers, sums in self._sums]

    def rows(self) -> Frame:
        return pl.DataFrame(schema=SCHEMA)


class BosMass(MeanProbe):
    """`bos_mass`, the mean weight on key 0 of queries where a head is needed, `position` "trigger",
    and of all others, "other" (Guo et al. 2024, arXiv 2410.13835): a head is active at the first
    and dormant at the second. Row 0, which sees key 0 alone, is left out.

    `triggers` says where heads are needed in the batch that is watched; without it, of ordinary
    text, all are "other". Rows for each head, and for the layer the mean over heads.
    """

    def __init__(self, triggers: Bool[Tensor, "B L"] | None = None) -> None:
        super().__init__()
        self.triggers = triggers

    def see_attention(self, event: AttentionEvent) -> None:
        """Add the mean weight that trigger queries give key 0, and the mean that the others give
        it; a sequence without queries of a kind adds nothing for it.
        """
        for b, sequence in enumerate(event.sequences):
            mass = first_column(sequence)[:, 1:]  # without query 0
            is_trigger = torch.zeros(sequence.length, dtype=torch.bool, device=mass.device)
            if self.triggers is not None:
                is_trigger = self.triggers[b].to(mass.device)
                if event.valid is not None:  # `sequence` has no padding
                    is_trigger = is_trigger[event.valid[b]]
            is_trigger = is_trigger[1:]
            for position, queries in (("trigger", is_trigger), ("other", ~is_trigger)):
                if bool(queries.any()):
                    per_head = mass[:, queries].mean(1)
                    self.put_heads(event.layer, "bos_mass", per_head, position=position)


class Entropy(MeanProbe):
    """`entropy` of token importance in nats (Value Residual Learning, eq. 11): low = concentrated.

    Variant `code` averages A over heads first, as the official code does (one row a layer);
    `per_head` takes each head's own, and their mean for the layer.
    """

    def see_attention(self, event: AttentionEvent) -> None:
        """Add, for each sequence, the entropy of the keys' importance, the mean attention that each
        key receives: of the heads' mean, as the paper's code computes it (variant "code"), and of
        each head.
        """
        for statistics in event.statistics:
            importance = statistics.importance
            of_mean = float(exact.entropy(importance.mean(0)))
            self.put(event.layer, "entropy", of_mean, variant="code")
            self.put_heads(event.layer, "entropy", exact.entropy(importance), variant="per_head")


class Importance(MeanProbe):
    """`importance` a_j of the first token and the mean of the rest, and `top_importance`, the k-th
    largest a_j, its `position` being k (Value Residual Learning, figs. 10 and 11).

    Variant `code` averages heads first (the layer's row); `per_head` gives each head's.
    """

    def __init__(self, *, top: Sequence[int] = (1, 2, 3, 5, 10)) -> None:
        super().__init__()
        self.top = tuple(top)

    def see_attention(self, event: AttentionEvent) -> None:
        """Add the importance of the first token, the rest's mean, and the k-th largest."""
        for statistics in event.statistics:
            importance = statistics.importance
            # "code": the papers' official code averages over heads first.
            for variant, a in (("code", importance.mean(0)), ("per_head", importance)):
                values = [("importance", "first", a[..., 0])]
                if a.shape[-1] > 1:
                    values.append(("importance", "rest", a[..., 1:].mean(-1)))
                values += [
                    ("top_importance", str(k), exact.top_importance(a, k))
                    for k in self.top
                    if k <= a.shape[-1]
                ]
                for metric, position, value in values:
                    self.put(event.layer, metric, value, variant=variant, position=position)


class Values(MeanProbe):
    """`value_eigenvalue`, `value_spectrum` and `value_drain` of the values attention mixes.

    The eigenvalues of (1/L) Σ v vᵀ with a layer's heads joined (Value Residual Learning, eq. 12):
    `value_eigenvalue` is the largest, `value_spectrum` at `position` i is λ_i / λ_1, i from 1 to
    `curve`. `value_drain` is ‖v_0‖ over the mean of the others (fig. 10), variant `paper` with the
    heads joined. Variant `per_head` of both has a row for each key/value head.
    """

    def __init__(self, *, curve: int = 32) -> None:
        super().__init__()
        self.curve = curve

    def see_attention(self, event: AttentionEvent) -> None:
        """Add the largest eigenvalue and the drain of values, with heads joined and one by one, and
        the spectrum with heads joined. A drain needs a second token.
        """
        for sequence in event.sequences:
            v = sequence.values
            joined = v.transpose(0, 1).flatten(1)
            # v vᵀ and vᵀ v have the same non-zero eigenvalues: the smaller is decomposed.
            length, width = joined.shape
            if length < width:
                moment = joined @ joined.T / length
                spectrum = torch.linalg.eigvalsh(moment).flip(0).clamp_min(0)
            else:
                spectrum = exact.value_spectrum(joined)
            self.put(event.layer, "value_eigenvalue", spectrum[0], position="1")
            per_head = exact.value_spectrum(v)[:, 0]
            self.put(event.layer, "value_eigenvalue", per_head, variant="per_head", position="1")
            for i, value in enumerate((spectrum[: self.curve] / spectrum[0]).tolist(), start=1):
                self.put(event.layer, "value_spectrum", value, position=str(i))
            if length > 1:
                drain = exact.value_drain(joined)
                self.put(event.layer, "value_drain", drain, position="first")
                per_head = exact.value_drain(v)
                self.put(event.layer, "value_drain", per_head, variant="per_head", position="first")


class FirstAttention(Probe):
    """Every head's weights among the first `tokens` positions of the first sequence alone, where
    each row and column is a token with a text. They are no metric: `frame()` has them.
    """

    COLUMNS: ClassVar[dict[str, type]] = {
        "layer": pl.Int64, "head": pl.Int64, "query": pl.Int64, "key": pl.Int64,
        "value": pl.Float64,
    }  # fmt: skip

    def __init__(self, *, tokens: int = 24) -> None:
        self.tokens = tokens
        self.weights: dict[int, list[list[list[float]]]] = {}

    def see_attention(self, event: AttentionEvent) -> None:
        """Keep a layer's weights in the first sequence that it sees; later events add nothing."""
        if event.layer in self.weights:
            return
        first = event.sequences[0]
        self.weights[event.layer] = [
            head_weights(first, head, self.tokens).tolist() for head in range(first.num_heads)
        ]

    def frame(self) -> Frame:
        """Return one row for each weight: layer, head, query, key, value. Zeros above the diagonal
        are left out.
        """
        rows = [
            (layer, head, query, key, value)
            for layer, heads in sorted(self.weights.items())
            for head, weights in enumerate(heads)
            for query, line in enumerate(weights)
            for key, value in enumerate(line)
            if key <= query or value > 0
        ]
        return pl.DataFrame(rows, schema=self.COLUMNS, orient="row")

    def rows(self) -> Frame:
        return pl.DataFrame(schema=SCHEMA)
