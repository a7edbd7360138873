"""What exhibits measure and draw of layers is what the probes they ask for see."""

import re
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from helpers import some_tokens, tiny_decoder
from wakeful.probes.attention import Importance
from wakeful.training import watching
from wakeful.training.watching import diagnose_windows
from wakeful_papers.exhibits.derived import Results, row_figure
from wakeful_papers.exhibits.exhibit import exhibit_names, read_exhibit
from wakeful_papers.exhibits.figures import PICTURES, Measurement, layer_curves
from wakeful_papers.reports.charts import draw_exhibit
from wakeful_papers.verbs.runs import DECODER_PROBES, GRADIENTS, PROBES

LOOKING = [
    name
    for name in exhibit_names()
    if read_exhibit(name).looks
    and read_exhibit(name).compare
    and GRADIENTS not in read_exhibit(name).probes
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
    always = set(layer_curves(diagnose_windows(decoder, windows, 2, [Importance()], ranks=False)))
    more = {
        name: set(layer_curves(diagnose_windows(decoder, windows, 2, [make()], ranks=False)))
        for name, make in PROBES.items()
        if name not in PICTURES
    }
    own = {
        name: set(layer_curves(diagnose_windows(decoder, windows, 2, [make(decoder)], ranks=False)))
        for name, make in DECODER_PROBES.items()
    }
    return {"": always, **more, **own}


@pytest.mark.parametrize("name", LOOKING)
def test_every_curve_that_an_exhibit_names_is_measured(
    name: str, seen: dict[str, set[str]]
) -> None:
    shown, asked = read_exhibit(name), Asked()
    rows = {claim.row for claim in shown.claims} | {shown.table.baseline}
    results = Results(
        shown.table.baseline, {}, {("", row, 0): Measurement({}, asked) for row in sorted(rows)}
    )
    for figure in {column.figure for column in shown.table.columns} | {
        claim.figure for claim in shown.claims
    }:
        row_figure(results, "", shown.table.baseline, 0, figure)
    draw_exhibit(shown, results)
    asked.names -= {"train_loss", "validation_loss"}
    measured = seen[""].union(*(seen[each] for each in shown.probes if each in seen))
    metrics = {each.partition("@")[0] + each[each.index("/") :] if "@" in each else each
               for each in asked.names}  # fmt: skip
    assert metrics - measured == set()


def test_windows_are_looked_at_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    decoder: Any = tiny_decoder()
    windows: Any = Windows()
    windows.token_file = SimpleNamespace(is_trigger=lambda rows: rows % 3 == rows[:, :1] % 3)
    whole = diagnose_windows(decoder, windows, 2, [Importance()])
    sizes: list[int] = []
    hidden = decoder.hidden

    def counted(tokens: torch.Tensor) -> torch.Tensor:
        sizes.append(len(tokens))
        return hidden(tokens)

    monkeypatch.setattr(decoder, "hidden", counted)
    monkeypatch.setattr(watching, "_AT_ONCE", 17)
    parts = diagnose_windows(decoder, windows, 2, [Importance()])
    assert sizes == [1, 1]
    assert "trigger" in parts.filter(metric="bos_mass")["position"]
    keys = ["layer", "head", "position", "metric", "variant", "kind"]
    assert parts.select(keys).equals(whole.select(keys))
    for column in ("value", "standard_error"):
        ours, theirs = (frame[column].fill_null(0.0).to_numpy() for frame in (parts, whole))
        np.testing.assert_allclose(ours, theirs, rtol=1e-9, atol=1e-12)


def test_ranks_are_looked_at_where_an_exhibit_asks_for_them() -> None:
    of_ranks = r"metric='(rank|mass_columns|near_rank_1\w*|lazy)'|lazy_layers"
    for name in LOOKING:
        shown = read_exhibit(name)
        named = [*shown.draw, *(column.figure for column in shown.table.columns)]
        named += [claim.figure for claim in shown.claims]
        assert ("ranks" in shown.probes) == any(re.search(of_ranks, each) for each in named), name


def test_the_lines_that_parameters_are_saved_by_are_drawn() -> None:
    shown = read_exhibit("value-residual/fig5-sizes")
    steps, falling = np.arange(1.0, 61.0), np.linspace(3.0, 2.0, 60)
    places = {name: float(group.at or 0) for name, group in shown.groups.items()}
    curves = {"train_loss": (steps, falling)}
    seen = {(group, row, 0): Measurement({"loss": 2.0, "parameters": place}, curves)
            for group, place in places.items() for row in ("vanilla", "resformer")}  # fmt: skip
    title, _, chart = draw_exhibit(shown, Results("vanilla", places, seen))[0]
    assert title == "training loss of the last steps"
    spec = chart.to_dict()
    (fitted,) = [layer for layer in spec["layer"] if "transform" in layer]
    assert fitted["transform"][0]["method"] == "log"
    points = spec["datasets"][fitted["data"]["name"]]
    assert {point["x"] for point in points} == {82, 180, 468}
