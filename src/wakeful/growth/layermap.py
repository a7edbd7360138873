"""Which block of a reference each block of a target starts from.

N layers in the reference, n in the target, both counted from 0 as in code.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from wakeful.errors import WakefulError


@dataclass(frozen=True)
class LayerMap:
    """Block `sources[t]` of the reference becomes block t of the target."""

    sources: tuple[int, ...]
    rule: str
    """How the blocks were chosen, for reports."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise WakefulError("a target needs at least 1 layer")
        if any(type(source) is not int or source < 0 for source in self.sources):
            raise WakefulError(f"layers are counted from 0, got {list(self.sources)}")

    def __len__(self) -> int:
        return len(self.sources)

    def check(self, num_layers: int) -> None:
        """Raise `WakefulError` unless a reference of `num_layers` layers has every source."""
        if max(self.sources) >= num_layers:
            raise WakefulError(
                f"the target wants layer {max(self.sources)}, and the reference has the layers 0 "
                f"to {num_layers - 1}"
            )

    def __str__(self) -> str:
        return f"{self.rule} ({written(self.sources)})"


def first(num_layers: int, *, of: int) -> LayerMap:
    """Return the first n layers: the paper's choice (algorithm 1)."""
    _check_depth(num_layers, of)
    return LayerMap(tuple(range(num_layers)), "first")


def middle(num_layers: int, *, of: int) -> LayerMap:
    """Return n contiguous layers around the middle (table 4's 5–8 of 12)."""
    _check_depth(num_layers, of)
    start = (of - num_layers) // 2
    return LayerMap(tuple(range(start, start + num_layers)), "middle")


def last(num_layers: int, *, of: int) -> LayerMap:
    """Return the last n layers (table 4's 9–12 of 12)."""
    _check_depth(num_layers, of)
    return LayerMap(tuple(range(of - num_layers, of)), "last")


def alternate(num_layers: int, *, of: int) -> LayerMap:
    """Return every second layer, as DistilBERT does (appendix B).

    A target of less than half the layers takes them evenly spread. One of more than half takes all
    even layers and then the r layers that are missing from a late run, N − 2 − r to N − 3: the
    paper's 16 of 24 are 0, 2 … 22 and 18, 19, 20, 21.
    """
    _check_depth(num_layers, of)
    even = range(0, of, 2)
    if num_layers <= len(even):
        return LayerMap(tuple(i * of // num_layers for i in range(num_layers)), "alternate")
    rest = num_layers - len(even)
    start = max(0, of - 2 - rest)
    return LayerMap((*even, *range(start, start + rest)), "alternate")


def stacked(num_layers: int, *, of: int) -> LayerMap:
    """Return the first ⌈n/2⌉ layers and then the same again, cut to n (hybrid stacking)."""
    half = -(-num_layers // 2)
    _check_depth(half, of)
    return LayerMap(tuple(i % half for i in range(num_layers)), "stacked")


def chosen(layers: Sequence[int], *, of: int) -> LayerMap:
    """Return the layers that are named, in the order they are named."""
    layer_map = LayerMap(tuple(layers), "named")
    layer_map.check(of)
    return layer_map


RANGES = {"first": first, "middle": middle, "last": last, "alternate": alternate,
          "stacked": stacked}  # fmt: skip
"""Layer maps that need no diagnosis, by name."""


def written(layers: Sequence[int]) -> str:
    """Return layer numbers with runs joined: 0–14, 20."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return ", ".join(f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _check_depth(num_layers: int, of: int) -> None:
    if num_layers < 1:
        raise WakefulError(f"layers = {num_layers}: a target needs at least 1")
    if num_layers > of:
        raise WakefulError(f"layers = {num_layers} is more than the reference's {of}")
