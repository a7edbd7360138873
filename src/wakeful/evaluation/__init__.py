"""Evaluate models: perplexity by our own code, tasks by lm-eval, size and speed."""

from typing import TYPE_CHECKING

from lazy_loader import attach

if TYPE_CHECKING:
    from wakeful.evaluation.options import EvaluateOptions
    from wakeful.evaluation.tool import Evaluation, evaluate

__all__ = ["EvaluateOptions", "Evaluation", "evaluate"]

__getattr__, __dir__, _ = attach(
    __name__,
    submod_attrs={
        "options": ["EvaluateOptions"],
        "tool": ["Evaluation", "evaluate"],
    },
)
