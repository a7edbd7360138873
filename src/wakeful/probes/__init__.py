"""Diagnostics: probes, a family of metrics a file, that `wakeful.watch` shows a model's passes to.

`exact` is the law; `streaming` and `certificates` are the fast paths that agree with it.
"""

from typing import TYPE_CHECKING

from lazy_loader import attach

if TYPE_CHECKING:
    from wakeful.probes.attention import BosMass, Entropy, Importance, Sinks, Values
    from wakeful.probes.base import AttentionEvent, HiddenEvent, MeanProbe, Probe
    from wakeful.probes.hidden import BlockInfluence, OutlierChannels, Outliers, Smoothing
    from wakeful.probes.rank import Ranks
    from wakeful.probes.watch import Watch

__all__ = [
    "AttentionEvent", "BlockInfluence", "BosMass", "Entropy", "HiddenEvent",
    "Importance", "MeanProbe", "OutlierChannels",
    "Outliers", "Probe", "Ranks", "Sinks", "Smoothing", "Values", "Watch",
]  # fmt: skip

__getattr__, __dir__, _ = attach(
    __name__,
    submod_attrs={
        "attention": ["BosMass", "Entropy", "Importance", "Sinks", "Values"],
        "base": ["AttentionEvent", "HiddenEvent", "MeanProbe", "Probe"],
        "hidden": ["BlockInfluence", "OutlierChannels", "Outliers", "Smoothing"],
        "rank": ["Ranks"],
        "watch": ["Watch"],
    },
)
