"""How attention spreads over tokens: importance, its entropy and its largest values."""

from collections.abc import Sequence

from wakeful.probes import exact
from wakeful.probes.base import AttentionEvent, Event, MeanProbe


class Entropy(MeanProbe):
    """`entropy` of token importance in nats (Value Residual Learning, eq. 11): low = concentrated.

    Variant `code` averages A over heads first, as the official code does (one row a layer);
    `per_head` takes each head's own, and their mean for the layer.
    """

    def see(self, event: Event) -> None:
        if not isinstance(event, AttentionEvent):
            return
        for statistics in event.statistics:
            importance = statistics.importance
            each = exact.entropy(importance)
            self.put(
                event.layer, "entropy", float(exact.entropy(importance.mean(0))), variant="code"
            )
            self.put(event.layer, "entropy", each, variant="per_head")
            self.put(event.layer, "entropy", float(each.mean()), variant="per_head")


class Importance(MeanProbe):
    """`importance` a_j of the first token and the mean of the rest, and `top_importance`, the k-th
    largest a_j, its `position` being k (Value Residual Learning, figs. 10 and 11).

    Variant `code` averages heads first (the layer's row); `per_head` gives each head's.
    """

    def __init__(self, *, top: Sequence[int] = (1, 2, 3, 5, 10)) -> None:
        super().__init__()
        self.top = tuple(top)

    def see(self, event: Event) -> None:
        if not isinstance(event, AttentionEvent):
            return
        for statistics in event.statistics:
            each = statistics.importance
            for variant, a in (("code", each.mean(0)), ("per_head", each)):
                put = [("importance", "first", a[..., 0])]
                if a.shape[-1] > 1:
                    put.append(("importance", "rest", a[..., 1:].mean(-1)))
                put += [
                    ("top_importance", str(k), exact.top_importance(a, k))
                    for k in self.top
                    if k <= a.shape[-1]
                ]
                for metric, position, value in put:
                    self.put(event.layer, metric, value, variant=variant, position=position)
