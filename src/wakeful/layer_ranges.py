"""Layer numbers as ranges of consecutive layers, grouped and printed."""

from collections.abc import Sequence


def format_layers(layers: Sequence[int]) -> str:
    """Return layer numbers as text, with consecutive ones as a range: "0–14, 20"."""
    return ", ".join(
        f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in group_layers(layers)
    )


def group_layers(layers: Sequence[int]) -> list[range]:
    """Return layer numbers as ranges of consecutive numbers, in the given order."""
    runs: list[range] = []
    for layer in layers:
        if runs and layer == runs[-1].stop:
            runs[-1] = range(runs[-1].start, layer + 1)
        else:
            runs.append(range(layer, layer + 1))
    return runs
