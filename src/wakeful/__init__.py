"""Language models with no lazy layers, no attention sinks and no outliers.

    import wakeful
    wakeful.diagnose("smollm2", text="book.txt")

Every verb about models and runs is a function here. Importing this package imports nothing heavy: a
name costs its imports when it is first used.
"""

from typing import TYPE_CHECKING

from lazy_loader import attach

from wakeful.errors import WakefulError
from wakeful.version import __version__

if TYPE_CHECKING:
    from wakeful.loading.load import load
    from wakeful.probes.watch import watch
    from wakeful.verbs.compare import compare
    from wakeful.verbs.cure import cure
    from wakeful.verbs.diagnose import diagnose
    from wakeful.verbs.evaluate import evaluate
    from wakeful.verbs.export import export
    from wakeful.verbs.generate import generate
    from wakeful.verbs.inherit import inherit
    from wakeful.verbs.quantize import quantize
    from wakeful.verbs.report import report
    from wakeful.verbs.train import train

__all__ = [
    "WakefulError", "__version__", "compare", "cure", "diagnose", "evaluate", "export", "generate",
    "inherit", "load", "quantize", "report", "train", "watch",
]  # fmt: skip

__getattr__, _, _ = attach(
    __name__,
    submod_attrs={
        "loading.load": ["load"],
        "probes.watch": ["watch"],
        "verbs.compare": ["compare"],
        "verbs.cure": ["cure"],
        "verbs.diagnose": ["diagnose"],
        "verbs.evaluate": ["evaluate"],
        "verbs.export": ["export"],
        "verbs.generate": ["generate"],
        "verbs.inherit": ["inherit"],
        "verbs.quantize": ["quantize"],
        "verbs.report": ["report"],
        "verbs.train": ["train"],
    },
)


def __dir__() -> list[str]:
    return __all__
