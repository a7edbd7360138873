"""Options of `diagnose`."""

from dataclasses import dataclass

from wakeful.config.options import How, HowMuch
from wakeful.config.reading import ReadingOptions
from wakeful.config.rules import AtLeast, Within


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions(ReadingOptions):
    """Metrics to measure, and the text."""

    num_sequences: HowMuch[int] = 4
    """Sequences, one after another from the text's beginning."""
    tau: How[float] = 0.9
    """Share of a head's energy that its rank holds."""
    lazy_rank: How[float] = 2.0
    """A layer is lazy when no head's rank is above this."""
    rank_tokens: int = 2048
    """Longest sequence whose ranks are settled exactly; past it they may be bounds."""
    rank_seconds: HowMuch[float] = 600.0
    """Seconds for exact ranks; ranks not settled by then are reported as bounds."""
    layers: How[tuple[int, ...]] = ()
    """Layers whose attention is pictured. Empty: four, spread over the depth."""
    heads: How[tuple[int, ...]] = ()
    """Heads whose attention is pictured. Empty: the first four."""

    no_advice: HowMuch[bool] = False
    """Do not try cures on 8 windows of the text; the diagnosis then recommends none."""

    RULES = (AtLeast("num_sequences", 1), Within("tau", "(0, 1)"))
