"""Diagnostics: probes that see a causal language model run.

    with wakeful.watch(model, Sinks(), Ranks(tau=0.9)) as seen:
        model(ids)
    seen.frame

`wakeful.watch` shows a model's forward passes to probes; each probe file holds one family of
metrics (attention, rank, hidden, patterns). `exact` is the law; `streaming`
and `certificates` are the fast paths that agree with it.
"""

from typing import TYPE_CHECKING

from wakeful.lazy import lazily

if TYPE_CHECKING:
    from wakeful.probes.attention import BosMass, Entropy, Importance, Leading, Sinks, Values
    from wakeful.probes.base import AttentionEvent, HiddenEvent, MeanProbe, MergeableProbe, Probe
    from wakeful.probes.channels import ChannelOverlap
    from wakeful.probes.hidden import BlockInfluence, OutlierChannels, Outliers, Smoothing, Turned
    from wakeful.probes.mappings import Mappings
    from wakeful.probes.patterns import AttentionPictures, HiddenPicture, MeanAttention
    from wakeful.probes.positions import Positions
    from wakeful.probes.rank import Ranks
    from wakeful.probes.spectrum import Spectrum
    from wakeful.probes.watch import Watch
    from wakeful.probes.weights import LargestWeights

__all__ = [
    "AttentionEvent", "AttentionPictures", "BlockInfluence", "BosMass", "ChannelOverlap", "Entropy",
    "HiddenEvent", "HiddenPicture", "Importance", "LargestWeights", "Leading", "Mappings",
    "MeanAttention", "MeanProbe", "MergeableProbe", "OutlierChannels", "Outliers", "Positions",
    "Probe", "Ranks", "Sinks", "Smoothing", "Spectrum", "Turned", "Values", "Watch",
]  # fmt: skip

__getattr__, __dir__ = lazily(__name__)
