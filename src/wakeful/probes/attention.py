"""Probes of attention: sinks, importance and its entropy, values, and the first token's role."""

from collections.abc import Sequence

import polars as pl
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wakeful.probes import exact
from wakeful.probes.base import SCHEMA, AttentionEvent, Frame, MeanProbe, Probe
from wakeful.probes.streaming import first_column


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
        """Add every head's share and mass of the first key, and of a stored prefix."""
        for statistics in event.statistics:
            length = statistics.column_sums.shape[-1]
            first = statistics.column_sums[:, 0]
            stored = statistics.stored_mass
            if stored is not None:
                self.put_heads(event.layer, "stored_prefix_mass", stored / length)
            pairs = [
                ("first_key_share", statistics.first_key_rows, statistics.row_0_dominated),
                ("first_key_mass", first, statistics.row_0_mass),
            ]
            for metric, total, row_0 in pairs:
                values = {f"{metric}_with_row_0": total / length}
                if length > 1:
                    values[f"{metric}_without_row_0"] = (total - row_0) / (length - 1)
                for name, per_head in values.items():
                    self.put_heads(event.layer, name, per_head)


class KeyShares(Probe):
    """Share of the attention that goes to each key of each sequence, over all heads and layers.

    They are no metric: `shares` and `masses` have them. `wakeful.diagnosis.later_sinks` sums them
    by token.
    """

    def __init__(self) -> None:
        self._sums: list[tuple[int, Float[Tensor, "2 L"]]] = []
        """Of each sequence: layers seen, and the sums over them of both."""
        self._layer, self._place = -1, 0

    def see_attention(self, event: AttentionEvent) -> None:
        """Add this layer's share and mass of each key to the sequences' sums."""
        if event.layer <= self._layer or not self._sums:  # the next forward pass
            self._place = len(self._sums)
            self._sums += [(0, torch.zeros(2, 0))] * len(event.statistics)
        self._layer = event.layer
        for index, statistics in enumerate(event.statistics, start=self._place):
            length = statistics.column_sums.shape[-1]
            both = [statistics.leading_rows.clone(), statistics.column_sums.clone()]
            if length > 1:
                both[0][:, 0] -= statistics.row_0_dominated
                both[1][:, 0] -= statistics.row_0_mass
            sums = torch.stack([totals.mean(0) / max(1, length - 1) for totals in both]).cpu()
            layers, previous = self._sums[index]
            self._sums[index] = layers + 1, sums if layers == 0 else previous + sums

    @property
    def shares(self) -> list[Float[Tensor, "L"]]:
        """For each sequence, by key: the fraction of (query, head, layer) triples, row 0 left out,
        whose largest weight is on that key.
        """
        return [both[0] / layers for layers, both in self._sums]

    @property
    def masses(self) -> list[Float[Tensor, "L"]]:
        """For each sequence the mean weight on each key, row 0 left out."""
        return [both[1] / layers for layers, both in self._sums]

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
        """Add the mean weight on BOS of trigger queries and of the other queries."""
        for b, sequence in enumerate(event.sequences):
            mass = first_column(sequence)[:, 1:]
            needed = torch.zeros(sequence.length, dtype=torch.bool, device=mass.device)
            if self.triggers is not None:
                needed = self.triggers[b].to(mass.device)
                needed = needed if event.valid is None else needed[event.valid[b]]
            for position, rows in (("trigger", needed[1:]), ("other", ~needed[1:])):
                if bool(rows.any()):
                    per_head = mass[:, rows].mean(1)
                    self.put_heads(event.layer, "bos_mass", per_head, position=position)


class Entropy(MeanProbe):
    """`entropy` of token importance in nats (Value Residual Learning, eq. 11): low = concentrated.

    Variant `code` averages A over heads first, as the official code does (one row a layer);
    `per_head` takes each head's own, and their mean for the layer.
    """

    def see_attention(self, event: AttentionEvent) -> None:
        for statistics in event.statistics:
            importance = statistics.importance
            joined = float(exact.entropy(importance.mean(0)))
            self.put(event.layer, "entropy", joined, variant="code")
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
        """Add the importance of the first token, of the rest, and of the largest."""
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


class Leading(MeanProbe):
    """`leading_key`, the place of the most important token, counted from 0, and
    `leading_importance`, its a_j (From Attention to Activation, section 3.2 and figure 2).

    Variant `code` averages heads first (the layer's row); `per_head` gives each head's.
    """

    def see_attention(self, event: AttentionEvent) -> None:
        for statistics in event.statistics:
            importance = statistics.importance
            # "code": the papers' official code averages over heads first.
            for variant, a in (("code", importance.mean(0)), ("per_head", importance)):
                largest, position = a.max(-1)
                self.put(event.layer, "leading_key", position.double(), variant=variant)
                self.put(event.layer, "leading_importance", largest, variant=variant)


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
        """Add the spectrum and the drain of values, heads joined and one by one."""
        for sequence in event.sequences:
            v = sequence.values
            joined = v.transpose(0, 1).flatten(1)
            # The smaller side has the same non-zero eigenvalues.
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
