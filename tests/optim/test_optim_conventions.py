"""What torch's own loops, hooks and schedules expect of an optimizer, asked of each of ours."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from optim.test_optim_build import OPTIONS, Tiny, step
from wakeful.errors import WakefulError
from wakeful.optim import OrthoAdam, build_optimizer
from wakeful.optim.muon import MuonAdamW

pytestmark = pytest.mark.filterwarnings("ignore:OrthoAdam does not know")
"""The axes of these small weights are of no concern here."""


def build(name: str, model: Tiny, **options: Any) -> torch.optim.Optimizer:
    return build_optimizer(name, model.named_parameters(), **OPTIONS[name] | options)


every_name = pytest.mark.parametrize("name", list(OPTIONS))


@every_name
@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("option", ["lr", "weight_decay"])
def test_rates_must_be_finite_and_not_negative(name: str, option: str, value: float) -> None:
    with pytest.raises(WakefulError, match=rf"{option}|[Ll]earning rate"):
        build_optimizer(name, Tiny().named_parameters(), **OPTIONS[name] | {option: value})


@pytest.mark.parametrize("expression", ["torch.optim:SGD(lr=nan)", "muon(lr=inf)"])
def test_rates_in_an_expression_too(expression: str) -> None:
    with pytest.raises(WakefulError):
        build_optimizer(expression, Tiny().named_parameters())


@every_name
def test_a_rate_of_two_numbers_is_refused_in_torch_s_words(name: str) -> None:
    lr = torch.tensor([0.1, 0.2])
    with pytest.raises(ValueError, match="Tensor lr must be 1-element"):
        build_optimizer(name, Tiny().named_parameters(), **OPTIONS[name] | {"lr": lr})


@every_name
def test_hooks_of_all_optimizers_are_called_once_a_step(name: str) -> None:
    model = Tiny()
    optimizer = build(name, model)
    calls: list[tuple[str, str]] = []
    handles = [
        register_optimizer_step_pre_hook(lambda o, *_: calls.append(("pre", type(o).__name__))),
        register_optimizer_step_post_hook(lambda o, *_: calls.append(("post", type(o).__name__))),
    ]
    try:
        step(model, optimizer, 2)
    finally:
        for handle in handles:
            handle.remove()
    kind = type(optimizer).__name__
    assert calls == 2 * [("pre", kind), ("post", kind)]


def test_schedules_that_cycle_the_momentum_cycle_muon_s() -> None:
    model = Tiny()
    optimizer = build("muon", model)
    OneCycleLR(optimizer, max_lr=0.1, total_steps=10, base_momentum=0.8, max_momentum=0.9)
    hidden, *rest = optimizer.param_groups
    assert hidden["momentum"] == 0.9
    assert all(group["betas"] == (0.9, 0.999) for group in rest)
    step(model, optimizer, 1)

    optimizer = build("muon", model)
    cycle = CyclicLR(optimizer, base_lr=0.01, max_lr=0.1, step_size_up=2)
    found = []
    for _ in range(4):
        step(model, optimizer, 1)
        cycle.step()
        found.append(optimizer.param_groups[0]["momentum"])
    assert found == pytest.approx([0.85, 0.8, 0.85, 0.9])


def test_muon_loads_a_count_of_steps_that_is_a_number() -> None:
    """As torch saved it before its counts were tensors."""
    model = Tiny()
    optimizer = build("muon", model)
    step(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    twin = copy.deepcopy(model)
    step(model, optimizer, 2)
    for state in saved["state"].values():
        if "step" in state:
            state["step"] = float(state["step"])
    again = build("muon", twin)
    again.load_state_dict(saved)
    step(twin, again, 2)
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("rotation", ["hadamard", "haar", "block_diagonal", "eigenbasis"])
@pytest.mark.parametrize("shape", [(3, 0), (0, 4), (0,), (0, 0)])
def test_a_parameter_without_entries_is_left_alone(rotation: str, shape: tuple[int, ...]) -> None:
    empty, full = nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.ones(3, 4))
    alone = nn.Parameter(torch.ones(3, 4))

    def trained(parameters: dict[str, nn.Parameter], **options: Any) -> OrthoAdam:
        optimizer = OrthoAdam(parameters.items(), rotation=rotation, **options)
        for _ in range(2):
            for parameter in parameters.values():
                parameter.grad = torch.arange(float(parameter.numel())).view(parameter.shape)
            optimizer.step()
        return optimizer

    optimizer = trained({"full": full, "empty": empty}, axes={"empty": 1})
    trained({"full": alone})
    assert torch.equal(full, alone)
    assert optimizer.plan()[1].why == "empty"
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def test_muon_leaves_a_matrix_without_entries_alone() -> None:
    parameters: dict[str, Tensor] = {
        "full": nn.Parameter(torch.ones(3, 4)), "empty": nn.Parameter(torch.zeros(3, 0)),
    }  # fmt: skip
    optimizer = MuonAdamW([{"params": list(parameters.items()), "weight_decay": 0.0}])
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert parameters["full"].isfinite().all()
