"""Sentences about an heir's layers and training, for its page and its model card."""

from wakeful.config.schema import BridgeConfig, DistillConfig, HealConfig
from wakeful.layer_ranges import format_layers
from wakeful.runs.records import BridgeGap

_MAPS = {
    "output": "a matrix on its feed-forward network's output, folded into W_down (ReplaceMe, arXiv "
    "2505.02819)",
    "down": "its W_down, solved anew (after ReplaceMe, arXiv 2505.02819)",
}


def describe_bridge(fit: BridgeGap, bridge: BridgeConfig | None) -> str:
    """Describe the bridge over dropped layers and its error; None is an unknown map."""
    solved = f": {_MAPS[bridge.map]}" if bridge and bridge.map in _MAPS else ", in closed form"
    layers = format_layers(range(fit.first, fit.last + 1))
    return (
        f"Layers {layers} are bridged by the layer before them{solved}. On the text it was solved "
        "on, the stream behind them was then off by "
        f"{fit.error:.1%} of its square, and by {fit.plain:.1%} without a bridge."
    )


def describe_objective(lesson: HealConfig | DistillConfig, teacher: str, student: str) -> str:
    """Return the loss of distillation as a formula."""
    share = f"{lesson.alpha:g} CE + {1 - lesson.alpha:g} · " if lesson.alpha else ""
    squared = f"{lesson.temperature**2:g} · " if lesson.temperature != 1 else ""
    heat = f" at temperature {lesson.temperature:g}" if lesson.temperature != 1 else ""
    mean = isinstance(lesson, DistillConfig) and lesson.over == "mean"
    over = " averaged over the vocabulary" if mean else ""
    return f"{share}{squared}KL({teacher} ‖ {student}){over}{heat}"
