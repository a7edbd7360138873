"""Options of the verbs: one dataclass a verb, for flags, Python and files alike.

Nothing here imports torch, so that `--help` is quick.
"""

from wakeful.config.verbs.cure import CureOptions
from wakeful.config.verbs.diagnose import DiagnoseOptions
from wakeful.config.verbs.evaluate import EvaluateOptions, with_shots
from wakeful.config.verbs.export import ExportOptions
from wakeful.config.verbs.generate import GenerateOptions
from wakeful.config.verbs.given import NoOptions, filled, options_from
from wakeful.config.verbs.inherit import SHORT, Choose, Copy, GrowFrom, InheritOptions, Until
from wakeful.config.verbs.prepare import PrepareOptions
from wakeful.config.verbs.quantize import ArithmeticName, QuantizeOptions, SavedAs, ScaleKind
from wakeful.config.verbs.reading import (
    LENGTH,
    REFERENCES,
    SOURCES,
    Bos,
    Drawn,
    Dtype,
    FigureFormat,
)
from wakeful.config.verbs.report import ReportOptions
from wakeful.config.verbs.sample import SampleOptions

__all__ = [
    "LENGTH", "REFERENCES", "SHORT", "SOURCES", "ArithmeticName", "Bos", "Choose", "Copy",
    "CureOptions", "DiagnoseOptions", "Drawn", "Dtype", "EvaluateOptions", "ExportOptions",
    "FigureFormat",
    "GenerateOptions", "GrowFrom", "InheritOptions", "NoOptions", "PrepareOptions",
    "QuantizeOptions", "ReportOptions", "SampleOptions", "SavedAs",
    "ScaleKind", "Until", "filled", "options_from", "with_shots",
]  # fmt: skip
