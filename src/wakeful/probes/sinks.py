"""Attention sinks: how much of the attention the first token takes."""

from wakeful.probes.base import AttentionEvent, Event, MeanProbe


class FirstToken(MeanProbe):
    """`first_key_share` and `first_key_mass` (From Attention to Activation, sections 3.1 and 5).

    The share is the fraction of (query, head) pairs whose largest weight is key 0, the mass the
    mean weight on key 0. Row 0 sees key 0 alone; variant `paper` counts it, `without_row_0` not.
    Rows for each head, and for the layer the mean over heads.
    """

    def see(self, event: Event) -> None:
        if not isinstance(event, AttentionEvent):
            return
        for statistics in event.statistics:
            length = statistics.column_sums.shape[-1]
            first = statistics.column_sums[:, 0]
            pairs = [
                ("first_key_share", statistics.first_key_rows, statistics.row_0_dominated),
                ("first_key_mass", first, statistics.row_0_mass),
            ]
            for metric, total, row_0 in pairs:
                values = {"paper": total / length}
                if length > 1:
                    values["without_row_0"] = (total - row_0) / (length - 1)
                for variant, each in values.items():
                    self.put(event.layer, metric, each, variant=variant)
                    self.put(event.layer, metric, float(each.mean()), variant=variant)
