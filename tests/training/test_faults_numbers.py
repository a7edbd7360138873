"""A loss or gradient that is not a number stops a run before it spoils a checkpoint."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from training.faults import left_by
from training.runs import tiny
from training.test_loop import weights
from wakeful.config.schema import Config
from wakeful.errors import WakefulError
from wakeful.loading.load import read_decoder
from wakeful.model.decoder import Decoder
from wakeful.runs import checkpoint
from wakeful.runs.run import Run
from wakeful.training.loop import train_run


def test_a_loss_that_is_no_number_stops_the_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = Decoder.loss, []

    def loss(self: Decoder, *arguments: torch.Tensor, **options: str) -> torch.Tensor:
        value = real(self, *arguments, **options)  # pyright: ignore[reportArgumentType]
        calls.append(torch.is_grad_enabled())
        return value * float("nan") if sum(calls) == 5 else value

    monkeypatch.setattr(Decoder, "loss", loss)
    with pytest.raises(WakefulError, match=r"loss is nan at step 5.*training tokens \d+.*step 3"):
        train_run(tiny(text), tmp_path / "run")
    run = Run.open(tmp_path / "run")
    assert run.header.status == "stopped"
    assert checkpoint.steps(run.checkpoints) == [3]
    checkpoint.verify_checkpoint(checkpoint.newest_checkpoint(run.checkpoints))
    assert all(torch.isfinite(tensor).all() for tensor in weights(run).values())


def broken_step(monkeypatch: pytest.MonkeyPatch, at: int, spoil: Callable[[Any], None]) -> None:
    """Spoil a parameter right after AdamW's step number `at`."""
    real, calls = torch.optim.AdamW.step, []

    def step(self: torch.optim.AdamW, *arguments: Any) -> Any:
        result = real(self, *arguments)
        calls.append(1)
        if len(calls) == at:
            spoil(self.param_groups[0]["params"][0])
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", step)


@pytest.mark.slow
def test_weights_that_are_no_numbers_are_never_saved(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncut: dict[str, Any]
) -> None:
    with monkeypatch.context() as patch:
        broken_step(patch, 6, lambda parameter: parameter.data[0].fill_(math.inf))
        with pytest.raises(
            WakefulError, match=r"a weight is not finite at step 6, on the batch .*of step 3 is"
        ):
            train_run(tiny(text, train={"eval_every": 0}), tmp_path / "run")
    assert checkpoint.steps(Run.open(tmp_path / "run").checkpoints) == [3]
    actual = left_by(train_run(Config(), tmp_path / "run", resume=True))
    assert actual["weights"] == uncut["weights"]
    assert actual["summary"] == uncut["summary"]


@pytest.mark.slow
def test_a_gradient_that_is_no_number_changes_no_weight(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncut: dict[str, Any]
) -> None:
    real, calls = Decoder.loss, []

    def loss(self: Decoder, *arguments: torch.Tensor, **options: str) -> torch.Tensor:
        value = real(self, *arguments, **options)  # pyright: ignore[reportArgumentType]
        calls.append(torch.is_grad_enabled())
        if torch.is_grad_enabled() and sum(calls) == 5:
            value.register_hook(lambda gradient: gradient * math.nan)
        return value

    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "loss", loss)
        with pytest.raises(WakefulError, match=r"gradient norm is nan at step 5.*tokens \d+"):
            train_run(tiny(text), tmp_path / "run")
    run = Run.open(tmp_path / "run")
    assert [row["step"] for row in run.metrics() if row["kind"] == "train"] == [1, 2, 3, 4]
    assert left_by(train_run(Config(), tmp_path / "run", resume=True)) == uncut


def test_a_validation_loss_that_is_no_number_stops_the_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Decoder.loss

    def loss(self: Decoder, *arguments: torch.Tensor, **options: str) -> torch.Tensor:
        value = real(self, *arguments, **options)  # pyright: ignore[reportArgumentType]
        return value if torch.is_grad_enabled() else value * math.nan

    monkeypatch.setattr(Decoder, "loss", loss)
    with pytest.raises(WakefulError, match="the validation loss is nan after step 3"):
        train_run(tiny(text), tmp_path / "run")
    assert Run.open(tmp_path / "run").header.status == "stopped"


def test_an_absurd_learning_rate_ends_in_one_line_or_a_finite_run(
    text: Path, tmp_path: Path
) -> None:
    rates = {"lr": 1e38, "final_lr": 1e38, "initial_lr": 1e38, "warmup_steps": 0, "clip": 0.0}
    config = tiny(text, optimizer=rates | {"name": "torch.optim:SGD"})
    with pytest.raises(WakefulError, match=r"step \d.*(optimizer\.lr)") as caught:
        train_run(config, tmp_path / "run")
    assert "\n" not in str(caught.value)
    for step in checkpoint.steps(tmp_path / "run" / "checkpoints"):
        decoder = read_decoder(tmp_path / "run", step=step, dtype="auto").decoder()
        assert all(parameter.isfinite().all() for parameter in decoder.parameters())
