"""Maps from the blocks of a target to the blocks of a reference that they start from.

N layers in the reference, n in the target, both counted from 0 as in code. A diagnosis chooses by

| by | figure of a layer (docs/metrics.md) | kept |
|---|---|---|
| rank | largest rank of its heads, mean over sequences | the highest |
| mass | columns that hold the attention's mass, mean over heads | the highest |
| influence | 1 − cos(x_in, x_out), mean over tokens | the highest |
| angle | arccos cos(x_l, x_{l+m}) / π at the last token | all but the runs with the least sum |
| bridge | loss without a run of m layers, once it is bridged | all but the run with the least |
| lazy | as rank | the run of n layers with the lowest mean: what not to inherit (fig. 3) |

Layers keep their order. With `pinned` = p the first p layers stay whatever their figures say, and
by angle and bridge the last layer too, which turns a state into a prediction.
"""

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import polars as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.layer_ranges import format_layers
from wakeful.model.decoder import Decoder
from wakeful.model.evaluating import evaluating
from wakeful.probes.base import SCHEMA, Frame, HiddenEvent, Probe
from wakeful.probes.hidden import BlockInfluence
from wakeful.probes.rank import Ranks
from wakeful.probes.watch import watch
from wakeful.terminal.display import OnProgress, ignore_progress


@dataclass(frozen=True)
class LayerMap:
    """Block `sources[t]` of the reference becomes block t of the target."""

    sources: tuple[int, ...]
    rule: str
    """Rule by which the blocks were chosen, for reports."""

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

    @property
    def ascends(self) -> bool:
        """True where no layer goes back or repeats."""
        return all(earlier < later for earlier, later in itertools.pairwise(self.sources))

    def __str__(self) -> str:
        return f"{self.rule} ({format_layers(self.sources)})"


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
    if num_layers < len(even):
        return LayerMap(tuple(i * of // num_layers for i in range(num_layers)), "alternate")
    rest = num_layers - len(even)
    start = max(0, of - 2 - rest)
    return LayerMap((*even, *range(start, start + rest)), "alternate")


def stacked(num_layers: int, *, of: int) -> LayerMap:
    """Return the first ⌈n/2⌉ layers and then the same again, cut to n (hybrid stacking)."""
    _check_depth(num_layers, of)
    return twice(num_layers, of=of)


def twice(num_layers: int, *, of: int) -> LayerMap:
    """Return `stacked` layers, of a model that may have no more than ⌈n/2⌉ layers."""
    half = -(-num_layers // 2)
    _check_depth(half, of)
    return LayerMap(tuple(i % half for i in range(num_layers)), "stacked")


def named_layers(layers: Sequence[int], *, of: int) -> LayerMap:
    """Return these layers, in this order."""
    layer_map = LayerMap(tuple(layers), "named")
    layer_map.check(of)
    return layer_map


RANGES = {"first": first, "middle": middle, "last": last, "alternate": alternate,
          "stacked": stacked}  # fmt: skip
"""Layer maps that need no diagnosis, by name."""


def parse_layers(texts: Sequence[str]) -> list[int]:
    """Return the layers that texts such as "0-2" and "18" list: inverse of `format_layers`."""
    layers: list[int] = []
    for part in " ".join(texts).replace(",", " ").split():
        match = re.fullmatch(r"(\d{1,6})(?:[-–](\d{1,6}))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise WakefulError(f"layers are written as 0-2 18-29, got {part!r}")
        layers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return layers


def _check_depth(num_layers: int, of: int) -> None:
    if num_layers < 1:
        raise WakefulError(f"layers = {num_layers}: a target needs at least 1")
    if num_layers > of:
        raise WakefulError(f"layers = {num_layers} is more than the reference's {of}")


By = Literal["rank", "mass", "influence", "angle", "bridge", "lazy"]
_ROWS = {
    "rank": ("rank", "all"),
    "mass": ("mass_columns", "all"),
    "influence": ("block_influence", "all"),
    "angle": ("angular_distance", "last"),
}
"""Metric and position of the layer's figure in a diagnosis."""


@dataclass(frozen=True)
class LayerDiagnosis:
    """Measurements of a reference's layers that layers are chosen by."""

    figures: dict[str, list[float]]
    """One figure per layer for each row of the module's table; `angle` is that of single blocks."""
    angles: list[list[float]]
    """`angles[l][k]`: angular distance between the inputs of layers l and k, k > l; where k is the
    number of layers, to the last one's output."""
    losses: Mapping[int, float] = field(default_factory=dict)
    """Nats per token without the run that begins at each layer, for `bridge`."""

    @property
    def num_layers(self) -> int:
        return len(self.figures["rank"])


class Angles(Probe):
    """The last token's state at the input of every layer, and at the output of the last."""

    def __init__(self) -> None:
        self.inputs: dict[int, list[Tensor]] = {}
        self.outputs: dict[int, list[Tensor]] = {}

    def see_hidden(self, event: HiddenEvent) -> None:
        if event.before is None:
            return
        for states, sequences in ((self.inputs, event.inputs), (self.outputs, event.sequences)):
            tokens = [sequence[-1].double() for sequence in sequences]
            states.setdefault(event.layer, []).extend(tokens)

    def rows(self) -> Frame:
        """Return no rows: angles between layers are a matrix."""
        return pl.DataFrame(schema=SCHEMA)

    def matrix(self) -> Tensor:
        """Return arccos(cos(x_l, x_k)) / π, mean over sequences, (N + 1, N + 1)."""
        layers = sorted(self.inputs)
        ends = [*(self.inputs[layer] for layer in layers), self.outputs[layers[-1]]]
        states = torch.stack([torch.stack(states) for states in ends])
        unit = F.normalize(states, dim=-1)
        cosines = torch.einsum("lsd,ksd->slk", unit, unit).clamp(-1, 1)
        return cosines.arccos().mean(0) / math.pi


def diagnose_layers(
    decoder: Decoder, sequences: Sequence[Sequence[int]], progress: OnProgress = ignore_progress
) -> LayerDiagnosis:
    """Run a decoder over sequences of one length and measure every layer."""
    progress(0, len(sequences))
    angles = Angles()
    device = decoder.head.weight.device
    watched = watch(decoder, Ranks(), BlockInfluence(), angles)
    with evaluating(decoder), torch.inference_mode(), watched as watcher:
        for done, sequence in enumerate(sequences, start=1):
            decoder.hidden(torch.tensor([list(sequence)], device=device))
            progress(done, len(sequences))
    rows = watcher.frame
    figures = {by: _column(rows, *row) for by, row in _ROWS.items()}
    return LayerDiagnosis(figures, angles.matrix().tolist())


def growth_order(
    diagnosed: LayerDiagnosis, by: By, num_layers: int, *, pinned: int = 1, gaps: int = 1
) -> list[int]:
    """Return all layers in the order in which targets of growing depth take them.

    A target of `num_layers` layers has the first `num_layers` of the list; growth adds the next.
    `gaps` is the number of runs of neighbors that `angle` may drop.
    """
    total = diagnosed.num_layers
    if by not in get_args(By):
        raise WakefulError(f"choose must be one of {', '.join(get_args(By))}, got {by!r}")
    if not 0 < num_layers <= total:
        raise WakefulError(f"layers = {num_layers}: must be between 1 and the reference's {total}")
    if not 0 <= pinned <= num_layers:
        raise WakefulError(f"pinned = {pinned} must be between 0 and the {num_layers} layers kept")
    if by == "angle":
        stop = total if num_layers <= pinned else total - 1  # the last, where one is left for it
        layers = range(pinned, stop)
        return _order_by_runs(
            diagnosed.angles, _least_angle_runs(diagnosed.angles, layers, total - num_layers, gaps)
        )
    if by == "bridge":
        losses = diagnosed.losses
        starts = sorted(losses, key=lambda start: losses[start])[:1]  # none of a whole model
        return _order_by_runs(
            diagnosed.angles, [(start, start + total - num_layers) for start in starts]
        )
    if by == "lazy":
        run = laziest(diagnosed.figures["rank"], num_layers).sources
        return [*run, *(layer for layer in range(total) if layer not in run)]
    figures = diagnosed.figures[by]
    free = sorted(range(pinned, total), key=lambda layer: (-figures[layer], layer))
    return [*range(pinned), *free]


def from_order(order: Sequence[int], num_layers: int, rule: str) -> LayerMap:
    """Return the map of the first `num_layers` layers of an order."""
    if num_layers > len(order):
        raise WakefulError(f"layers = {num_layers} is more than the reference's {len(order)}")
    return LayerMap(tuple(sorted(order[:num_layers])), rule)


def _order_by_runs(angles: Sequence[Sequence[float]], runs: list[tuple[int, int]]) -> list[int]:
    """Return all layers, those of the dropped runs last, in the order in which they grow back."""
    total = len(angles) - 1
    left_out = {layer for start, stop in runs for layer in range(start, stop)}
    order = [layer for layer in range(total) if layer not in left_out]

    def gained(start: int, stop: int, rest: range) -> float:
        return (angles[rest.start][rest.stop] if rest else 0.0) - angles[start][stop]

    while runs:
        # The end of a run grows back without which the rest of the run turns least.
        ends = [
            (start, stop, rest)
            for start, stop in runs
            for rest in (range(start + 1, stop), range(start, stop - 1))
        ]
        start, stop, rest = min(ends, key=lambda end: gained(*end))
        order.append(stop - 1 if rest.stop < stop else start)
        runs = [run for run in runs if run != (start, stop)]
        runs += [(rest.start, rest.stop)] if rest else []
    return order


def _least_angle_runs(
    angles: Sequence[Sequence[float]], layers: range, dropped: int, gaps: int
) -> list[tuple[int, int]]:
    """Return at most `gaps` runs of `dropped` layers in total with the least sum of angles.

    The angle of a run is how far the stream turns over it (Gromov et al. 2024). At least one layer
    stays between two runs. Of equal sums the earlier run is taken.
    """
    # best[layers dropped, runs]: the least sum of angles and its runs; ended[s]: the same before s.
    best: dict[tuple[int, int], tuple[float, list[tuple[int, int]]]] = {(0, 0): (0.0, [])}
    ended = {}
    for stop in range(layers.start, layers.stop + 1):
        ended[stop] = dict(best)
        for start in range(layers.start, stop):
            for (count, runs), (angle, chosen) in ended[start].items():
                key, new_angle = (count + stop - start, runs + 1), angle + angles[start][stop]
                if key[0] > dropped or key[1] > gaps:
                    continue
                if key not in best or new_angle < best[key][0]:
                    best[key] = new_angle, [*chosen, (start, stop)]
    reached = [best[dropped, runs] for runs in range(gaps + 1) if (dropped, runs) in best]
    if not reached:
        raise WakefulError(
            f"{dropped} of the layers {format_layers(layers)} cannot be left out in {gaps} runs"
        )
    return min(reached, key=lambda candidate: candidate[0])[1]


def laziest(ranks: Sequence[float], num_layers: int) -> LayerMap:
    """Return the contiguous run of layers with the lowest mean rank, a later one if they tie."""
    starts = range(len(ranks) - num_layers + 1)
    start = min(starts, key=lambda s: (sum(ranks[s : s + num_layers]), -s))
    return LayerMap(tuple(range(start, start + num_layers)), "lazy")


def _column(rows: Frame, metric: str, position: str) -> list[float]:
    selected = rows.filter(
        pl.col("head").is_null(), metric=metric, variant="paper", position=position
    )
    return selected.sort("layer")["value"].to_list()
