"""Maps from the blocks of a target to the blocks of a reference that they start from.

N layers in the reference, n in the target, both counted from 0 as in code. By `angle` all layers
stay but the runs over which the last token's state turns least: arccos cos(x_l, x_{l+m}) / π over a
run of m layers from l (Gromov et al. 2024). Layers keep their order. The first layer stays whatever
the angles say, and so does the last, which turns a state into a prediction.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import polars as pl
import torch
import torch.nn.functional as F
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.model.evaluating import evaluating
from wakeful.probes.base import SCHEMA, Frame, HiddenEvent, Probe
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


def first(num_layers: int, *, of: int) -> LayerMap:
    """Return the first n layers: the paper's choice (algorithm 1)."""
    _check_depth(num_layers, of)
    return LayerMap(tuple(range(num_layers)), "first")


def named_layers(layers: Sequence[int], *, of: int) -> LayerMap:
    """Return these layers, in this order."""
    layer_map = LayerMap(tuple(layers), "named")
    layer_map.check(of)
    return layer_map


def _check_depth(num_layers: int, of: int) -> None:
    if num_layers < 1:
        raise WakefulError(f"layers = {num_layers}: a target needs at least 1")
    if num_layers > of:
        raise WakefulError(f"layers = {num_layers} is more than the reference's {of}")


class Angles(Probe):
    """The last token's state at the input of every layer, and at the output of the last."""

    def __init__(self) -> None:
        self.inputs: dict[int, list[Tensor]] = {}
        self.outputs: dict[int, list[Tensor]] = {}

    def see_hidden(self, event: HiddenEvent) -> None:
        """Keep the input and output of a block at each sequence's last token."""
        if event.before is None:  # the embedding, which has no input
            return
        # `sequences` are the block's outputs.
        for states, sequences in ((self.inputs, event.inputs), (self.outputs, event.sequences)):
            last_tokens = [sequence[-1].double() for sequence in sequences]
            states.setdefault(event.layer, []).extend(last_tokens)

    def rows(self) -> Frame:
        """Return no rows: angles between layers are a matrix."""
        return pl.DataFrame(schema=SCHEMA)

    def matrix(self) -> Tensor:
        """Return the angles arccos(cos(x_l, x_k)) / π between every two depths, (N + 1, N + 1),
        averaged over sequences.

        x_l is the input of layer l at a sequence's last token, and x_N the last layer's output.
        """
        layers = sorted(self.inputs)
        layer_states = [*(self.inputs[layer] for layer in layers), self.outputs[layers[-1]]]
        states = torch.stack([torch.stack(states) for states in layer_states])
        unit = F.normalize(states, dim=-1)  # (layers, sequences, width)
        cosines = torch.einsum("lsd,ksd->slk", unit, unit).clamp(-1, 1)
        return cosines.arccos().mean(0) / math.pi


def diagnose_layers(
    decoder: Decoder, sequences: Sequence[Sequence[int]], progress: OnProgress = ignore_progress
) -> list[list[float]]:
    """Return the matrix (N + 1, N + 1) of angular distances between the inputs of layers l and k at
    the last token, means over sequences of one length. Row and column N are of the last layer's
    output.
    """
    progress(0, len(sequences))
    angles = Angles()
    device = decoder.head.weight.device
    watched = watch(decoder, angles)
    with evaluating(decoder), torch.inference_mode(), watched:
        for num_done, sequence in enumerate(sequences, start=1):
            decoder.hidden(torch.tensor([list(sequence)], device=device))
            progress(num_done, len(sequences))
    return angles.matrix().tolist()


def growth_order(angles: Sequence[Sequence[float]], num_layers: int) -> list[int]:
    """Return all layers in the order in which targets of growing depth take them, by angle.

    A target of `num_layers` layers has the first `num_layers` of the list. They are all layers but
    the run of neighbors over which the stream turns least (Gromov et al. 2024), the earliest of
    equal runs. A growing target takes back the run's layers one by one: its first or its last,
    whichever leaves the lower angle over the rest. `angles` is the matrix of `diagnose_layers`.
    """
    total = len(angles) - 1
    _check_depth(num_layers, total)
    num_dropped = total - num_layers
    # The first layer is kept, and so is the last, unless only one layer may be kept.
    kept_at_end = 1 if num_layers > 1 else 0
    last_start = total - num_dropped - kept_at_end
    start = min(range(1, last_start + 1), key=lambda first: angles[first][first + num_dropped])
    stop = start + num_dropped  # the run is [start, stop)
    order = [*range(start), *range(stop, total)]
    while start < stop:
        # The angle over the rest, without the run's first layer and without its last.
        if angles[start + 1][stop] <= angles[start][stop - 1]:
            order.append(start)
            start += 1
        else:
            stop -= 1
            order.append(stop)
    return order


def from_order(order: Sequence[int], num_layers: int, rule: str) -> LayerMap:
    """Return the map of the first `num_layers` layers of an order, sorted by depth. `rule` is the
    rule that the order follows.
    """
    if num_layers > len(order):
        raise WakefulError(f"layers = {num_layers} is more than the reference's {len(order)}")
    return LayerMap(tuple(sorted(order[:num_layers])), rule)
