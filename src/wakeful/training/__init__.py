"""Train models and compare them."""

from typing import TYPE_CHECKING

from lazy_loader import attach

if TYPE_CHECKING:
    from wakeful.training.charts import (
        METRIC_TITLES,
        difference_chart,
        metric_charts,
        relative_loss_chart,
    )
    from wakeful.training.compared import ComparedRuns, TrainedRun
    from wakeful.training.comparison import Comparison, compare, report_comparison
    from wakeful.training.loop import Initial, resume_command, train_run
    from wakeful.training.parallel import choose_own_device
    from wakeful.training.report import caveat, comparison_verdicts
    from wakeful.training.setup import NO_AUTOCAST, autocast, check_parts, check_run
    from wakeful.training.size import run_operations, run_size
    from wakeful.training.tables import machines
    from wakeful.training.tool import TrainingRun, train
    from wakeful.training.validation import mean_loss, window_losses

__all__ = [
    "METRIC_TITLES",
    "NO_AUTOCAST",
    "ComparedRuns",
    "Comparison",
    "Initial",
    "TrainedRun",
    "TrainingRun",
    "autocast",
    "caveat",
    "check_parts",
    "check_run",
    "choose_own_device",
    "compare",
    "comparison_verdicts",
    "difference_chart",
    "machines",
    "mean_loss",
    "metric_charts",
    "relative_loss_chart",
    "report_comparison",
    "resume_command",
    "run_operations",
    "run_size",
    "train",
    "train_run",
    "window_losses",
]

__getattr__, __dir__, _ = attach(
    __name__,
    submod_attrs={
        "charts": ["METRIC_TITLES", "difference_chart", "metric_charts", "relative_loss_chart"],
        "compared": ["ComparedRuns", "TrainedRun"],
        "comparison": ["Comparison", "compare", "report_comparison"],
        "loop": ["Initial", "resume_command", "train_run"],
        "parallel": ["choose_own_device"],
        "report": ["caveat", "comparison_verdicts"],
        "setup": ["NO_AUTOCAST", "autocast", "check_parts", "check_run"],
        "size": ["run_operations", "run_size"],
        "tables": ["machines"],
        "tool": ["TrainingRun", "train"],
        "validation": ["mean_loss", "window_losses"],
    },
)
