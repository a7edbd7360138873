"""Options of `diagnose`."""

from dataclasses import dataclass

from wakeful.config.options import HowMuch
from wakeful.config.reading import ReadingOptions
from wakeful.config.rules import AtLeast


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions(ReadingOptions):
    """The text that models read, and whether cures are tried."""

    num_sequences: HowMuch[int] = 4
    """Sequences, one after another from the text's beginning."""
    no_advice: HowMuch[bool] = False
    """Do not try cures on 8 windows of the text; the diagnosis then recommends none."""

    RULES = (AtLeast("num_sequences", 1),)
