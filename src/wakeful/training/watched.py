"""Chosen metrics of a model while it trains."""

import polars as pl
import torch
from jaxtyping import Int
from torch import Tensor

from wakeful.data.order import ValidationWindows
from wakeful.model.decoder import Decoder
from wakeful.probes.attention import Entropy, Sinks, Values
from wakeful.probes.base import Event, Frame, Probe, mean_over_layers
from wakeful.probes.hidden import Outliers
from wakeful.probes.rank import Ranks
from wakeful.probes.watch import watch
from wakeful.training.parallel import Alone, Parallel
from wakeful.world import ALONE, World

FIGURES = {
    "first_key_share_without_row_0": ("first_key_share_without_row_0", "paper", "all"),
    "first_key_mass_with_row_0": ("first_key_mass_with_row_0", "paper", "all"),
    "entropy": ("entropy", "code", "all"),
    "rank": ("rank", "paper", "all"),
    "near_rank_1": ("near_rank_1", "paper", "all"),
    "value_drain": ("value_drain", "paper", "first"),
    "kurtosis_first": ("kurtosis", "paper", "first"),
    "kurtosis_rest": ("kurtosis", "paper", "rest"),
    "max_activation_first": ("max_activation", "paper", "first"),
    "max_activation_rest": ("max_activation", "paper", "rest"),
}
"""Metric, variant and position of each figure that a run logs, as docs/metrics.md defines them."""


class _Layers(Probe):
    """Every `size`-th layer's events, from `rank` on, for a probe."""

    def __init__(self, probe: Probe, world: World) -> None:
        self.probe = probe
        self.world = world

    def see(self, event: Event) -> None:
        if event.layer % self.world.size == self.world.rank:
            self.probe.see(event)

    def rows(self) -> Frame:
        return self.probe.rows()


def measure(decoder: Decoder, windows: ValidationWindows, num_sequences: int) -> dict[str, float]:
    """Return each figure's mean over layers, on the first whole windows of the validation set."""
    return measure_over(Alone(decoder, ALONE), windows, num_sequences)


@torch.no_grad()
def measure_over(
    parallel: Parallel, windows: ValidationWindows, num_sequences: int
) -> dict[str, float]:
    """Return what `measure` does, on every process: each looks at its share of the layers."""
    decoder, world = parallel.decoder, parallel.world
    device = decoder.head.weight.device
    sequences = whole_windows(windows, num_sequences)
    training = decoder.training
    decoder.eval()
    probes = Sinks(), Entropy(), Ranks(), Values(curve=1), Outliers()
    with watch(decoder, *(_Layers(probe, world) for probe in probes)) as seen:
        parallel.call(decoder.hidden, torch.cat(sequences).to(device))
    parallel.settle()
    decoder.train(training)
    rows = seen.frame
    of_layers = rows.filter(rows["head"].is_null()).rows()
    everywhere = [tuple(row) for part in world.gather(of_layers) for row in part]
    return _figures(pl.DataFrame(everywhere, schema=rows.schema, orient="row").sort("layer"))


def whole_windows(windows: ValidationWindows, number: int) -> list[Int[Tensor, "1 L"]]:
    """Return the inputs of the first `number` windows that no end of text fills up, or of all."""
    wanted = min(number, max(1, windows.num_predicted // windows.length))
    rows: list[Tensor] = []
    for inputs, _ in windows:
        rows += inputs[: wanted - len(rows)].split(1)
        if len(rows) == wanted:
            break
    return rows


def _figures(rows: Frame) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, (metric, variant, position) in FIGURES.items():
        chosen = rows.filter(
            (rows["metric"] == metric)
            & (rows["variant"] == variant)
            & (rows["position"] == position)
        )
        mean = mean_over_layers(chosen)
        if mean is not None:
            found[name] = mean
    return found
