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
    """Return sentences on the bridge over dropped layers, a linear map that replaces them: which
    matrix it is, and its error on the text that it was solved on. With `bridge` None, or
    a map that is not in `_MAPS`, the kind of matrix is left out.
    """
    how = f": {_MAPS[bridge.map]}" if bridge and bridge.map in _MAPS else ", in closed form"
    layers = format_layers(range(fit.first, fit.last + 1))
    return (
        f"Layers {layers} are bridged by the layer before them{how}. On the text it was solved "
        "on, the stream behind them was then off by "
        f"{fit.error:.1%} of its square, and by {fit.plain:.1%} without a bridge."
    )


def describe_objective(config: HealConfig | DistillConfig, teacher: str, student: str) -> str:
    """Return the loss of distillation as a formula, α CE + (1 − α) T² KL(teacher ‖ student); terms
    and factors that have no effect are left out.
    """
    cross_entropy = f"{config.alpha:g} CE + {1 - config.alpha:g} · " if config.alpha else ""
    squared, temperature = "", ""
    if config.temperature != 1:
        squared = f"{config.temperature**2:g} · "
        temperature = f" at temperature {config.temperature:g}"
    is_mean = isinstance(config, DistillConfig) and config.over == "mean"
    averaged = " averaged over the vocabulary" if is_mean else ""
    return f"{cross_entropy}{squared}KL({teacher} ‖ {student}){averaged}{temperature}"
