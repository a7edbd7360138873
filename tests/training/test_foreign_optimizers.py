"""Optimizers of other packages by name: resumed to the bit, judged by the right weights, or refused
before there is a folder.
"""

import dataclasses
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from training.faults import Signalling
from training.runs import tiny
from training.test_loop import losses, silent, stop_after
from wakeful.errors import Interrupted, WakefulError
from wakeful.optim.build import check_step
from wakeful.runs import checkpoint
from wakeful.runs.records import ValidationRow, logged_rows
from wakeful.training.loop import train_run
from wakeful.training.rows import train_variants
from wakeful.variants.discovery import trust_modules

ODD = "training.odd_optimizers:"
OTHERS = [
    "pytorch_optimizer:Prodigy", "pytorch_optimizer:AdEMAMix",
    "pytorch_optimizer:AdEMAMix(betas=(0.8, 0.9, 0.99))",
    "pytorch_optimizer:SOAP", "pytorch_optimizer:EmoNavi",
    "pytorch_optimizer:Shampoo(weight_decouple=True)",
    "torch.optim:Adafactor", "torch.optim:NAdam", "torch.optim:RAdam", "torch.optim:ASGD",
    f"{ODD}Nested", f"{ODD}two_rates",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_each_resumes_to_the_bit(
    text: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name.startswith("pytorch_optimizer"):
        pytest.importorskip("pytorch_optimizer")
    config = tiny(text, optimizer={"name": name}, train={"checkpoint_every": 3})
    uninterrupted = train_run(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_after(patch, 5)
        with pytest.raises(RuntimeError, match="stop"):
            train_run(config, tmp_path / "cut")
    with pytest.raises(Interrupted):  # where an uninterrupted run has no checkpoint
        train_run(config, tmp_path / "cut", resume=True, show=Signalling(signal.SIGTERM, 4))
    resumed = train_run(config, tmp_path / "cut", resume=True)
    assert losses(resumed) == losses(uninterrupted)
    assert logged_rows(resumed, ValidationRow) == logged_rows(uninterrupted, ValidationRow)
    for file in ("model.safetensors", "optimizer.safetensors"):
        first, second = (
            load_file(checkpoint.newest_checkpoint(run.checkpoints) / file)
            for run in (uninterrupted, resumed)
        )
        assert first.keys() == second.keys()
        for key, tensor in first.items():
            assert torch.equal(second[key], tensor), key


def test_groups_keep_the_ratio_of_their_rates(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates_per_step: list[list[float]] = []
    real = torch.optim.AdamW.step

    def step(self: torch.optim.Optimizer, *args: Any) -> None:
        rates_per_step.append([group["lr"] for group in self.param_groups])
        real(self, *args)

    config = tiny(text, optimizer={"name": f"{ODD}two_rates"})
    monkeypatch.setattr(torch.optim.AdamW, "step", step)
    run = train_run(config, tmp_path / "run")
    rates = [row["lr"] for row in run.metrics() if row["kind"] == "train"]
    # The first step is taken before a run begins.
    rates_per_step = rates_per_step[-len(rates) :]
    assert [first for first, _ in rates_per_step] == rates
    assert [second for _, second in rates_per_step] == pytest.approx([rate / 5 for rate in rates])


REFUSED = {
    f"{ODD}Averaged": "cannot train: it evaluates other weights",
    f"{ODD}Queued": "before of its state is of the type deque",
    f"{ODD}Closed": "cannot train: .* missing 1 required positional argument: 'closure'",
    f"{ODD}Late(betas=(0.9, 0.99))": "cannot train: not enough values to unpack",
    f"{ODD}Modelled": "Modelled: 'list' object has no attribute 'parameters'",
    "torch.optim:SparseAdam": "cannot train: SparseAdam does not support dense",
    "torch.optim:Adafactor(eps=0.1)": "Adafactor.*: 'float' object is not subscriptable",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_train_is_refused_before_there_is_a_folder(
    text: Path, tmp_path: Path, name: str
) -> None:
    config = tiny(text, optimizer={"name": name})
    with pytest.raises(WakefulError, match=REFUSED[name]):
        train_run(config, tmp_path / "run")
    with pytest.raises(WakefulError, match=REFUSED[name]):
        train_variants(
            {"plain": tiny(text), "odd": config}, tmp_path / "both", seeds=[0], display=silent
        )
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "both").exists()


def test_options_of_another_form_are_the_expressions(text: Path) -> None:
    config = tiny(text).optimizer
    with trust_modules(["torch.optim", ODD.removesuffix(":")]):
        for name in (f"{ODD}Late", f"{ODD}Late(betas=[0.9, 0.99, 0.5])", "torch.optim:Adafactor",
                     "torch.optim:Adafactor(eps=(None, 0.01))"):  # fmt: skip
            check_step(dataclasses.replace(config, name=name))
        with pytest.raises(WakefulError, match="leave betas out of the expression"):
            check_step(dataclasses.replace(config, name="torch.optim:NAdam(betas=(0.9, 0.99))"))
