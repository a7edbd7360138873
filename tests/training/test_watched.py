"""Metrics logged while training."""

from pathlib import Path

import pytest
import torch

from training.runs import tiny
from training.test_loop import losses
from wakeful.data.order import ValidationWindows
from wakeful.errors import WakefulError
from wakeful.loading.load import read_decoder
from wakeful.probes import exact
from wakeful.probes.base import AttentionEvent, Event, HiddenEvent, Probe
from wakeful.probes.streaming import head_weights
from wakeful.probes.watch import watch
from wakeful.training.loop import train
from wakeful.training.measures import FIGURES, watched
from wakeful.training.setup import load_data


class Weights(Probe):
    """Keeps every head's weights."""

    def __init__(self) -> None:
        self.layers: list[torch.Tensor] = []

    def see(self, event: Event) -> None:
        if isinstance(event, AttentionEvent):
            for sequence in event.sequences:
                heads = [head_weights(sequence, h) for h in range(sequence.num_heads)]
                self.layers.append(torch.stack(heads))

    def rows(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError


class Hiddens(Probe):
    """Keeps what every block put out, and the embedding apart."""

    def __init__(self) -> None:
        self.blocks: list[torch.Tensor] = []
        self.embedding: list[torch.Tensor] = []

    def see(self, event: Event) -> None:
        if isinstance(event, HiddenEvent):
            (self.embedding if event.layer < 0 else self.blocks).extend(event.sequences)

    def rows(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError


def test_a_run_logs_its_diagnosis_and_trains_as_without(text: Path, tmp_path: Path) -> None:
    plain = train(tiny(text), tmp_path / "plain")
    seen = train(tiny(text, train={"diagnose": {"every": 4}}), tmp_path / "seen")
    assert losses(seen) == losses(plain)
    rows = [row for row in seen.metrics() if row["kind"] == "diagnosis"]
    assert [row["step"] for row in rows] == [4, 8]
    assert set(rows[0]) == {"kind", "step", *FIGURES}
    assert rows[0] != rows[1]


def test_the_figures_are_means_over_layers_of_the_definitions(text: Path, tmp_path: Path) -> None:
    config = tiny(text)
    trained = read_decoder(train(config, tmp_path / "run").path, dtype="auto")
    windows = ValidationWindows(load_data(config.data).validation, length=16, batch_size=2)
    found = watched(trained.decoder(), windows, 3)
    probe, hidden = Weights(), Hiddens()
    inputs = torch.cat([batch[0] for batch in windows])[:3]
    with torch.no_grad(), watch(trained.decoder(), probe, hidden):
        trained.decoder()(inputs)
    heads = torch.stack(probe.layers)  # layers × sequences, in that order
    assert len(heads) == 2 * 3
    mass = heads[..., 0].mean()
    assert found["first_key_mass_with_row_0"] == pytest.approx(float(mass), rel=1e-5)
    ranks = exact.rank(heads).double().view(2, 3, -1)  # layer, sequence, head
    share = torch.stack([exact.first_key_share(A, with_row_0=False) for A in heads]).mean()
    assert found["first_key_share_without_row_0"] == pytest.approx(float(share), rel=1e-5)
    assert found["rank"] == pytest.approx(float(ranks.mean(1).amax(1).mean()))
    assert (len(hidden.blocks), len(hidden.embedding)) == (2 * 3, 3)
    kurtosis = torch.stack([exact.kurtosis(h) for h in hidden.blocks])
    assert found["kurtosis_first"] == pytest.approx(float(kurtosis[:, 0].mean()), rel=1e-5)
    assert found["kurtosis_rest"] == pytest.approx(float(kurtosis[:, 1:].mean()), rel=1e-5)
    largest = torch.stack([h.abs().amax(-1) for h in hidden.blocks])
    assert found["max_activation_first"] == pytest.approx(float(largest[:, 0].mean()), rel=1e-5)


def test_weights_that_cannot_be_seen_are_refused_before_the_run(text: Path, tmp_path: Path) -> None:
    config = tiny(text, model={"route": "crosslayer"}, train={"diagnose": {"every": 4}})
    with pytest.raises(WakefulError, match=r"layer 1 .* not one"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
