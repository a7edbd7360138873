"""Metrics logged while training."""

import json
import math
import shutil
from pathlib import Path

import polars as pl
import pytest
import torch

from helpers import some_tokens, tiny_decoder
from training.runs import tiny
from training.test_loop import losses
from wakeful.config.schema import Config
from wakeful.data.order import ValidationWindows
from wakeful.data.preparing import load_data
from wakeful.errors import WakefulError
from wakeful.loading.load import read_decoder
from wakeful.probes import exact
from wakeful.probes.attention import BosMass
from wakeful.probes.base import AttentionEvent, Event, Frame, HiddenEvent, Probe
from wakeful.probes.streaming import head_weights
from wakeful.probes.watch import watch
from wakeful.routes import Differential
from wakeful.runs.run import Run
from wakeful.training import watching
from wakeful.training.loop import train_run
from wakeful.training.watching import (
    DIAGNOSED_METRICS,
    PER_HEAD_METRICS,
    diagnose_windows,
    figures,
    whole_windows,
)


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
    """Stores the output of every block, and the embedding separately."""

    def __init__(self) -> None:
        self.blocks: list[torch.Tensor] = []
        self.embedding: list[torch.Tensor] = []

    def see(self, event: Event) -> None:
        if isinstance(event, HiddenEvent):
            (self.embedding if event.layer < 0 else self.blocks).extend(event.sequences)

    def rows(self) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError


@pytest.mark.slow
def test_a_run_logs_its_diagnosis_and_trains_as_without(text: Path, tmp_path: Path) -> None:
    plain = train_run(tiny(text), tmp_path / "plain")
    run = train_run(tiny(text, train={"diagnose": {"every": 4}}), tmp_path / "seen")
    assert losses(run) == losses(plain)
    rows = [row for row in run.metrics() if row["kind"] == "diagnosis"]
    assert [row["step"] for row in rows] == [4, 8]
    assert set(rows[0]) == {"kind", "step", *DIAGNOSED_METRICS} - {"bos_mass_trigger"}
    assert run.trajectories().is_empty()
    assert not (run.path / "trajectories.jsonl").exists()
    assert rows[0] != rows[1]


@pytest.mark.slow
@pytest.mark.parametrize(("every", "steps"), [(4, [4, 8]), (3, [3, 6, 8])])
def test_the_last_step_is_diagnosed_once(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, steps: list[int]
) -> None:
    measurements: list[dict[str, float]] = []

    def counted(rows: Frame) -> dict[str, float]:
        measurements.append(figures(rows))
        return measurements[-1]

    monkeypatch.setattr(watching, "figures", counted)
    options = {"diagnose": {"every": every, "heads": True}}
    run = train_run(tiny(text, train=options), tmp_path / "run")
    rows = [row for row in run.metrics() if row["kind"] == "diagnosis"]
    assert [row["step"] for row in rows] == steps
    assert len(measurements) == len(steps)
    assert run.trajectories()["step"].unique().sort().to_list() == [0, *steps]
    assert run.read_json("summary.json")["diagnosis"] == measurements[-1]


@pytest.mark.slow
def test_the_figures_are_means_over_layers_of_the_definitions(text: Path, tmp_path: Path) -> None:
    config = tiny(text)
    trained = read_decoder(train_run(config, tmp_path / "run").path, dtype="auto")
    windows = ValidationWindows(load_data(config.data).validation, length=16, batch_size=2)
    actual = figures(diagnose_windows(trained.decoder(), windows, 3))
    probe, hidden = Weights(), Hiddens()
    inputs = torch.cat([batch[0] for batch in windows])[:3]
    with torch.no_grad(), watch(trained.decoder(), probe, hidden):
        trained.decoder()(inputs)
    heads = torch.stack(probe.layers)  # layers × sequences, in that order
    assert len(heads) == 2 * 3
    mass = heads[..., 0].mean()
    assert actual["first_key_mass_with_row_0"] == pytest.approx(float(mass), rel=1e-5)
    ranks = exact.rank(heads).double().view(2, 3, -1)  # layer, sequence, head
    share = torch.stack([exact.first_key_share(A, with_row_0=False) for A in heads]).mean()
    assert actual["first_key_share_without_row_0"] == pytest.approx(float(share), rel=1e-5)
    assert actual["rank"] == pytest.approx(float(ranks.mean(1).amax(1).mean()))
    assert actual["bos_mass_other"] == pytest.approx(float(heads[:, :, 1:, 0].mean()), rel=1e-5)
    assert (len(hidden.blocks), len(hidden.embedding)) == (2 * 3, 3)
    peaks = torch.stack([exact.residual_peak(h) for h in hidden.blocks])
    assert actual["residual_peak"] == pytest.approx(float(peaks.mean()), rel=1e-5)
    kurtosis = torch.stack([exact.kurtosis(h) for h in hidden.blocks])
    assert actual["kurtosis_first"] == pytest.approx(float(kurtosis[:, 0].mean()), rel=1e-5)
    assert actual["kurtosis_rest"] == pytest.approx(float(kurtosis[:, 1:].mean()), rel=1e-5)
    largest = torch.stack([h.abs().amax(-1) for h in hidden.blocks])
    assert actual["max_activation_first"] == pytest.approx(float(largest[:, 0].mean()), rel=1e-5)


@pytest.mark.slow
def test_every_head_is_followed_over_steps(text: Path, tmp_path: Path) -> None:
    options = {"diagnose": {"every": 4, "heads": True, "num_sequences": 3}}
    config = tiny(text, train=options)
    plain, run = train_run(tiny(text), tmp_path / "plain"), train_run(config, tmp_path / "run")
    assert losses(run) == losses(plain)
    frame = run.trajectories()
    assert frame["step"].unique().sort().to_list() == [0, 4, 8]
    assert set(frame["metric"]) == set(PER_HEAD_METRICS)
    heads = frame.filter(pl.col("metric") == "bos_mass", pl.col("head").is_not_null())
    assert set(heads["position"]) == {"other"}  # text has no triggers
    assert heads.select("step", "layer", "head").rows() == [
        (step, layer, head) for step in (0, 4, 8) for layer in (0, 1) for head in (0, 1)
    ]
    # The last rows are of the final model, and the layer's are the means of its heads.
    windows = load_data(config.data).windows(config)
    trained = read_decoder(run.path, dtype="auto").decoder()
    probe = BosMass()
    with torch.no_grad(), watch(trained, probe):
        trained(torch.cat(whole_windows(windows, 3)))
    last = frame.filter(pl.col("step") == 8, pl.col("metric") == "bos_mass")
    assert last["value"].to_list() == pytest.approx(probe.rows()["value"].to_list(), rel=1e-5)
    layer_rows = frame.filter(pl.col("metric") == "bos_mass", pl.col("head").is_null())
    means = heads.group_by("step", "layer", maintain_order=True).agg(pl.col("value").mean())
    assert layer_rows["value"].to_list() == pytest.approx(means["value"].to_list())
    figures = [row for row in run.metrics() if row["kind"] == "diagnosis"]
    assert [row["step"] for row in figures] == [4, 8]
    of_run = layer_rows.group_by("step", maintain_order=True).agg(pl.col("value").mean())
    assert [row["bos_mass_other"] for row in figures] == pytest.approx(
        of_run["value"].to_list()[1:]
    )

    # A run that is stopped on the way goes on as if it had not been.
    for stop in (3, 6):
        copy = tmp_path / f"from-{stop}"
        shutil.copytree(run.path, copy)
        for path in (copy / "checkpoints").iterdir():
            if int(path.name.removeprefix("step-")) > stop:
                shutil.rmtree(path)
        again = train_run(Config(), copy, resume=True)
        assert (copy / "trajectories.jsonl").read_bytes() == (
            run.path / "trajectories.jsonl"
        ).read_bytes()
        assert again.trajectories().equals(frame)


def test_a_damaged_trajectory_is_told_of(tmp_path: Path) -> None:
    run = Run(tmp_path)
    row = {"kind": "figure", "step": 0, "layer": 0, "head": None, "position": "other"}
    row |= {"metric": "bos_mass", "variant": "paper", "value": 0.5, "standard_error": None}
    run.append(row, log="trajectories.jsonl")
    assert run.trajectories()["value"].to_list() == [0.5]
    for field, value in (("value", None), ("value", "x"), ("value", math.inf), ("layer", 2**70)):
        (tmp_path / "trajectories.jsonl").write_text(json.dumps(row | {field: value}) + "\n")
        with pytest.raises(WakefulError, match=r"lacks a field|not finite"):
            run.trajectories()


def test_sinks_at_triggers_are_told_apart() -> None:
    decoder = tiny_decoder(dtype=torch.float32).eval()
    tokens, triggers = some_tokens(3, 9), some_tokens(3, 9, vocab_size=2).bool()
    triggers[2] = False  # and one that has none
    weights, probe = Weights(), BosMass(triggers)
    valid = torch.arange(9) >= torch.tensor([[0], [2], [0]])
    with torch.no_grad(), watch(decoder, weights, probe):
        decoder(tokens, valid=valid)
    rows = probe.rows()
    for position, mask in (("trigger", triggers), ("other", ~triggers)):
        means = []
        for b in range(3 if position == "other" else 2):
            chosen = mask[b, valid[b]][1:]
            means.append(weights.layers[b][:, 1:, 0][:, chosen].mean(1))
        actual = rows.filter(
            pl.col("position") == position, pl.col("layer") == 0, pl.col("head").is_not_null()
        )
        expected = torch.stack(means).mean(0).tolist()
        assert actual["value"].to_list() == pytest.approx(expected, rel=1e-5)


def test_weights_that_cannot_be_seen_are_refused_before_the_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Differential, "one_matrix", False)
    config = tiny(text, model={"route": "differential"}, train={"diagnose": {"every": 4}})
    with pytest.raises(WakefulError, match=r"layer 0 .* not one"):
        train_run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
