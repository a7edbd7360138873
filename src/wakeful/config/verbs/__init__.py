"""Options of the verbs: one dataclass a verb, for flags, Python and files alike.

Nothing here imports torch, so that `--help` is quick.
"""

from wakeful.config.verbs.cure import CureOptions
from wakeful.config.verbs.data import PrepareOptions, SampleOptions
from wakeful.config.verbs.diagnose import DiagnoseOptions
from wakeful.config.verbs.evaluate import EvaluateOptions, with_shots
from wakeful.config.verbs.export import ExportOptions
from wakeful.config.verbs.generate import GenerateOptions
from wakeful.config.verbs.given import NoOptions, filled, options_from, takes
from wakeful.config.verbs.inherit import SHORT, BaselineName, Copy, GrowFrom, InheritOptions, Until
from wakeful.config.verbs.quantize import QuantizeOptions
from wakeful.config.verbs.reading import (
    LENGTH,
    REFERENCES,
    SOURCES,
    Bos,
    Drawn,
    FigureFormat,
    TableFormat,
)  # fmt: skip
from wakeful.config.verbs.report import ReportOptions

__all__ = [
    "LENGTH", "REFERENCES", "SHORT", "SOURCES", "BaselineName", "Bos", "Copy", "CureOptions",
    "DiagnoseOptions", "Drawn", "EvaluateOptions", "ExportOptions", "FigureFormat",
    "GenerateOptions", "GrowFrom", "InheritOptions", "NoOptions", "PrepareOptions",
    "QuantizeOptions", "ReportOptions", "SampleOptions", "TableFormat", "Until",
    "filled", "options_from", "takes", "with_shots",
]  # fmt: skip
