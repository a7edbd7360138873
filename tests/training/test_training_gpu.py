"""On a GPU: the training loop, an optimizer's step and a compiled step, against the CPU's."""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

from training.runs import tiny
from wakeful.config.model import ModelConfig
from wakeful.model.decoder import Decoder
from wakeful.optim import OrthoAdam
from wakeful.training.compared import read_run
from wakeful.training.loop import train_run
from wakeful.training.tables import training_rows

TOLERANCE = 1e-3
"""Relative: float32's sums come in another order, and the steps of Adam, which divides small
gradients by small numbers, carry that on."""


def losses(text: Path, folder: Path, device: str, **over: object) -> tuple[np.ndarray, np.ndarray]:
    train_run(tiny(text, train={"device": device, "log_every": 3, **over}), folder)
    rows = training_rows(read_run(folder)).drop_nulls("loss")
    return rows["step"].to_numpy(), rows["loss"].to_numpy()


@pytest.mark.gpu
@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_the_loop_has_the_cpus_losses(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    """Batches are pinned and read ahead; losses are read every third step, and all are there."""
    pinned: list[bool] = []
    real = torch.Tensor.pin_memory

    def pin(batch: torch.Tensor) -> torch.Tensor:
        actual = real(batch)
        pinned.append(actual.is_pinned())
        return actual

    steps, expected = losses(text, tmp_path / "cpu", "cpu")
    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    found_steps, actual = losses(text, tmp_path / "cuda", "cuda", compile=compiled)
    assert len(pinned) >= 8
    assert all(pinned)
    assert steps.tolist() == found_steps.tolist()
    assert len(steps) == 8
    assert actual == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.gpu
@pytest.mark.usefixtures("as_users_run_it")
@pytest.mark.parametrize("compiled", [False, True])
def test_on_a_gpu_steps_of_orthoadam_are_the_cpus(compiled: bool) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        vocab_size=61, max_length=32, num_layers=2, num_heads=4, num_kv_heads=2, width=32,
        mlp_width=48, norm="rmsnorm_single", normalizer="softmax1",
    )  # fmt: skip
    here = Decoder(config)
    there = copy.deepcopy(here).to("cuda")
    tokens = torch.randint(0, 61, (4, 17), generator=torch.Generator().manual_seed(1))
    actual: dict[str, list[float]] = {"cpu": [], "cuda": []}
    for model, device in ((here, "cpu"), (there, "cuda")):
        optimizer = OrthoAdam(model.named_parameters(), lr=1e-2)
        loss_of = torch.compile(model.loss) if compiled and device == "cuda" else model.loss
        for _ in range(5):
            loss = loss_of(tokens[:, :-1].to(device), tokens[:, 1:].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            actual[device].append(loss.item())
    assert actual["cpu"][-1] < actual["cpu"][0] - 0.1
    assert actual["cuda"] == pytest.approx(actual["cpu"], rel=TOLERANCE)
