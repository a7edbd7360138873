"""Language models with no lazy layers, no attention sinks and no outliers.

    import wakeful
    wakeful.diagnose("smollm2", text="book.txt")

Every verb about models and runs is a function here. Importing this package imports nothing heavy: a
name costs its imports when it is first used.
"""

from lazy_loader import attach

from wakeful.errors import WakefulError
from wakeful.version import __version__

# `__init__.pyi` has the names for type checkers.
# pyright: reportUnsupportedDunderAll=false
__all__ = [
    "WakefulError", "__version__", "compare", "cure", "diagnose", "evaluate", "export", "generate",
    "inherit", "load", "quantize", "report", "train", "watch",
]  # fmt: skip

__getattr__, _, _ = attach(
    __name__,
    submod_attrs={
        "curing.tool": ["cure"],
        "diagnosis.tool": ["diagnose"],
        "evaluation.tool": ["evaluate"],
        "exporting.tool": ["export"],
        "generation.tool": ["generate"],
        "inheritance.tool": ["inherit"],
        "loading.load": ["load"],
        "probes.watch": ["watch"],
        "quantization.tool": ["quantize"],
        "reporting.tool": ["report"],
        "training.comparison": ["compare"],
        "training.tool": ["train"],
    },
)


def __dir__() -> list[str]:
    return __all__
