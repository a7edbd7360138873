"""Optimizers of other packages by name: resumed to the bit, judged by the right weights, or refused
before there is a folder.
"""

import dataclasses
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from training.faults import Signalling
from training.runs import tiny
from training.test_loop import losses, silent, stop_after, weights
from wakeful.errors import Interrupted, WakefulError
from wakeful.loading.load import read_decoder
from wakeful.optim.build import check_step
from wakeful.runs import checkpoint
from wakeful.runs.records import ValidationRow, logged_rows
from wakeful.training.loop import train_run
from wakeful.training.rows import train_variants
from wakeful.variants.discovery import trust_modules

ODD = "training.odd_optimizers:"
OTHERS = [
    "pytorch_optimizer:Prodigy", "pytorch_optimizer:ScheduleFreeAdamW",
    "pytorch_optimizer:AdEMAMix", "pytorch_optimizer:AdEMAMix(betas=(0.8, 0.9, 0.99))",
    "pytorch_optimizer:SPlus", "pytorch_optimizer:SOAP", "pytorch_optimizer:EmoNavi",
    "pytorch_optimizer:Shampoo(weight_decouple=True)",
    "torch.optim:Adafactor", "torch.optim:NAdam", "torch.optim:RAdam", "torch.optim:ASGD",
    f"{ODD}Nested", f"{ODD}Averaged", f"{ODD}two_rates",
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [f"{ODD}Averaged", "pytorch_optimizer:ScheduleFreeAdamW"])
def test_what_is_judged_and_kept_is_the_average(text: Path, tmp_path: Path, name: str) -> None:
    """Looking changes nothing, and all look at x = z + (y − z) / β, which the files hold."""
    if name.startswith("pytorch_optimizer"):
        pytest.importorskip("pytorch_optimizer")
    seldom = {"eval_every": 0, "checkpoint_every": 0}
    often = {"eval_every": 1, "checkpoint_every": 2, "diagnose": {"every": 3}}
    first, second = (
        train_run(tiny(text, optimizer={"name": name}, train=how), tmp_path / folder)
        for folder, how in (("seldom", seldom), ("often", often))
    )
    assert losses(first) == losses(second)
    for key, tensor in weights(first).items():
        assert torch.equal(weights(second)[key], tensor), key
    newest = checkpoint.newest_checkpoint(first.checkpoints)
    state, model = load_file(newest / "optimizer.safetensors"), weights(first)
    groups = json.loads((newest / "state.json").read_text())["optimizer"]["param_groups"]
    names = [key for group in groups for key in group["param_names"]]
    for number, key in enumerate(names):
        z, y = state[f"{number}.z"], state[f"trained.{number}"]
        torch.testing.assert_close(model[key], z + (y - z) / 0.9, rtol=0, atol=1e-6)
        assert not torch.equal(model[key], y)
    losses_there = [row.loss for row in logged_rows(second, ValidationRow)]
    assert losses_there[-1] == logged_rows(first, ValidationRow)[-1].loss
    read = read_decoder(first.path).decoder()
    for key, parameter in read.named_parameters():
        assert torch.equal(parameter, model[key]), key


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


@pytest.mark.slow
def test_a_changed_option_is_refused_and_a_counter_is_not(text: Path, tmp_path: Path) -> None:
    config = tiny(text, optimizer={"name": f"{ODD}Averaged"}, train={"checkpoint_every": 3})
    with pytest.raises(Interrupted):
        train_run(config, tmp_path / "run", show=Signalling(signal.SIGTERM, 4))
    path = tmp_path / "run" / "config.toml"
    before = path.read_text()
    path.write_text(before.replace("beta1 = 0.9", "beta1 = 0.8"))
    with pytest.raises(WakefulError, match=r"whose beta is 0\.9, and the configuration's is 0\.8"):
        train_run(config, tmp_path / "run", resume=True)
    path.write_text(before)
    assert train_run(config, tmp_path / "run", resume=True).header.status == "done"


def test_options_of_another_form_are_the_expressions(text: Path) -> None:
    config = tiny(text).optimizer
    with trust_modules(["torch.optim", ODD.removesuffix(":")]):
        for name in (f"{ODD}Late", f"{ODD}Late(betas=[0.9, 0.99, 0.5])", "torch.optim:Adafactor",
                     "torch.optim:Adafactor(eps=(None, 0.01))"):  # fmt: skip
            check_step(dataclasses.replace(config, name=name))
        with pytest.raises(WakefulError, match="betas is set beside the expression"):
            check_step(dataclasses.replace(config, name="torch.optim:NAdam(betas=(0.9, 0.99))"))
