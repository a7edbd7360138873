"""What the verbs return: each is a `Result`, with sentences, figures and a tidy table."""

from typing import TYPE_CHECKING

from lazy_loader import attach

if TYPE_CHECKING:
    from wakeful.verbs.compare import Comparison
    from wakeful.verbs.cure import Cure
    from wakeful.verbs.diagnose import Diagnosis
    from wakeful.verbs.evaluate import Evaluation
    from wakeful.verbs.inherited import Inheritance
    from wakeful.verbs.quantization import Quantization, QuantizationMatrix
    from wakeful.verbs.result import Result, Stored
    from wakeful.verbs.train import Run
    from wakeful.verbs.untrained import UntrainedHeir

__all__ = [
    "Comparison", "Cure", "Diagnosis", "Evaluation", "Inheritance", "Quantization",
    "QuantizationMatrix", "Result", "Run", "Stored", "UntrainedHeir",
]  # fmt: skip

__getattr__, __dir__, _ = attach(
    __name__,
    submod_attrs={
        "compare": ["Comparison"],
        "cure": ["Cure"],
        "diagnose": ["Diagnosis"],
        "evaluate": ["Evaluation"],
        "inherited": ["Inheritance"],
        "quantization": ["Quantization", "QuantizationMatrix"],
        "result": ["Result", "Stored"],
        "train": ["Run"],
        "untrained": ["UntrainedHeir"],
    },
)
