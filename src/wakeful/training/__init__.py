"""Train models and compare them."""

from typing import TYPE_CHECKING

from lazy_loader import attach

if TYPE_CHECKING:
    from wakeful.training.comparison import Comparison, compare, report_comparison
    from wakeful.training.loop import Initial, resume_command, train_run
    from wakeful.training.parallel import choose_own_device
    from wakeful.training.setup import NO_AUTOCAST, autocast, check_parts, check_run
    from wakeful.training.tool import TrainingRun, train
    from wakeful.training.validation import mean_loss, window_losses

__all__ = [
    "NO_AUTOCAST",
    "Comparison",
    "Initial",
    "TrainingRun",
    "autocast",
    "check_parts",
    "check_run",
    "choose_own_device",
    "compare",
    "mean_loss",
    "report_comparison",
    "resume_command",
    "train",
    "train_run",
    "window_losses",
]

__getattr__, __dir__, _ = attach(
    __name__,
    submod_attrs={
        "comparison": ["Comparison", "compare", "report_comparison"],
        "loop": ["Initial", "resume_command", "train_run"],
        "parallel": ["choose_own_device"],
        "setup": ["NO_AUTOCAST", "autocast", "check_parts", "check_run"],
        "tool": ["TrainingRun", "train"],
        "validation": ["mean_loss", "window_losses"],
    },
)
