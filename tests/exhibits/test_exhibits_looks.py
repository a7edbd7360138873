"""What exhibits measure and draw of layers is what the probes they ask for see."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers import some_tokens, tiny_decoder
from wakeful.exhibits.derived import Results, figure_of
from wakeful.exhibits.exhibit import exhibit, exhibit_names
from wakeful.exhibits.figures import PICTURES, Seen, of_layers
from wakeful.pages.exhibit_charts import drawings
from wakeful.probes.attention import Importance
from wakeful.probes.weights import LargestWeights
from wakeful.training.watching import observed
from wakeful.verbs.exhibit_runs import GRADIENTS, PROBES, WEIGHTS

LOOKING = [
    name
    for name in exhibit_names()
    if exhibit(name).looks and exhibit(name).compare and GRADIENTS not in exhibit(name).probes
]


class Asked(dict[str, Any]):
    """Curves of nothing, that remember which were asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.names.add(key)
        return default


class Windows:
    """Two windows of a text."""

    token_file = SimpleNamespace(is_trigger=lambda rows: None)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        tokens = some_tokens(2, 17)
        yield tokens[:, :-1], tokens[:, 1:]


@pytest.fixture(scope="module")
def seen() -> dict[str, set[str]]:
    """Curves by the probe that sees them, those of every run by the empty name."""
    decoder: Any = tiny_decoder(dtype=torch.float32)
    windows: Any = Windows()
    always = set(of_layers(observed(decoder, windows, 2, [Importance()])))
    more = {
        name: set(of_layers(observed(decoder, windows, 2, [make()])))
        for name, make in PROBES.items()
        if name not in PICTURES
    }
    weights = observed(decoder, windows, 2, [LargestWeights(decoder)])
    return {"": always, WEIGHTS: set(of_layers(weights)), **more}


@pytest.mark.parametrize("name", LOOKING)
def test_every_curve_that_an_exhibit_names_is_measured(
    name: str, seen: dict[str, set[str]]
) -> None:
    shown, asked = exhibit(name), Asked()
    rows = {claim.row for claim in shown.claims} | {shown.table.baseline}
    results = Results(
        shown.table.baseline, {}, {("", row, 0): Seen({}, asked) for row in sorted(rows)}
    )
    for figure in {column.figure for column in shown.table.columns} | {
        claim.figure for claim in shown.claims
    }:
        figure_of(results, "", shown.table.baseline, 0, figure)
    drawings(shown, results)
    asked.names -= {"train_loss", "validation_loss"}
    measured = seen[""].union(*(seen[each] for each in shown.probes if each in seen))
    metrics = {each.partition("@")[0] + each[each.index("/") :] if "@" in each else each
               for each in asked.names}  # fmt: skip
    assert metrics - measured == set()


def test_the_lines_that_parameters_are_saved_by_are_drawn() -> None:
    shown = exhibit("value-residual/fig5-sizes")
    steps, falling = np.arange(1.0, 61.0), np.linspace(3.0, 2.0, 60)
    places = {name: float(group.at or 0) for name, group in shown.groups.items()}
    curves = {"train_loss": (steps, falling)}
    seen = {(group, row, 0): Seen({"loss": 2.0, "parameters": place}, curves)
            for group, place in places.items() for row in ("vanilla", "resformer")}  # fmt: skip
    title, chart = drawings(shown, Results("vanilla", places, seen))[0]
    assert title == "training loss of the last steps"
    spec = chart.to_dict()
    (fitted,) = [layer for layer in spec["layer"] if "transform" in layer]
    assert fitted["transform"][0]["method"] == "log"
    points = spec["datasets"][fitted["data"]["name"]]
    assert {point["x"] for point in points} == {82, 180, 468}
