"""OrthoAdam's checkpoints: what they hold, and whose they must be."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from optim.problems import (
    RULES,
    WIDTH,
    assert_same,
    ortho,
    train,
    weights,
)
from wakeful.errors import WakefulError
from wakeful.optim.groups import decay_groups
from wakeful.optim.orthoadam import OrthoAdam
from wakeful.optim.rotations import rotation_names
from wakeful.optim.sides import Rule


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("rotation", rotation_names())
def test_a_checkpoint_goes_on_bit_for_bit(rotation: str, dtype: torch.dtype) -> None:
    w = weights(dtype)
    optimizer = ortho(w, rotation)
    train(w, optimizer, 13)
    saved = through_a_file(optimizer.state_dict())
    w2 = {name: nn.Parameter(p.detach().clone()) for name, p in w.items()}
    optimizer2 = ortho(w2, rotation)
    optimizer2.load_state_dict(saved)
    train(w, optimizer, 12, start=13)
    train(w2, optimizer2, 12, start=13)
    assert_same(w, w2, 0)
    optimizer2.load_state_dict(saved)  # into an optimiser that has a state already
    assert float(optimizer2.state[w2["rows"]]["step"]) == 13
    for a, b in zip(optimizer.param_groups, optimizer2.param_groups, strict=True):
        assert a["rotations"] == b["rotations"]


def test_a_checkpoint_of_no_step_starts_afresh() -> None:
    w = weights()
    fresh = ortho(w, "eigenbasis").state_dict()
    used, plain = ortho(w, "eigenbasis"), weights()
    train(w, used, 3)
    used.load_state_dict(fresh)
    with torch.no_grad():
        for name, p in w.items():
            p.copy_(plain[name])
    train(w, used, 3)
    train(plain, ortho(plain, "eigenbasis"), 3)
    assert_same(w, plain, 0)


def test_a_checkpoint_holds_the_seed_and_never_the_matrix() -> None:
    w = weights(width=64)
    optimizer = ortho(w, "haar", seed=7)
    train(w, optimizer, 1)
    saved = optimizer.state_dict()
    assert saved["param_groups"][0]["rotations"][0] == [
        {"kind": "haar", "seed": 7, "name": "rows", "axis": 1, "width": 64}
    ]
    for state in saved["state"].values():
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
    assert all(t.shape != (64, 64) for s in saved["state"].values() for t in s.values())


def wrong_states() -> dict[str, tuple[Callable[[], dict[str, Any]], str]]:
    def of(**more: Any) -> Callable[[], dict[str, Any]]:
        def make() -> dict[str, Any]:
            w = weights(width=more.pop("width", WIDTH))
            if more.pop("renamed", False):
                w["rows"], w["columns"] = w["columns"], w["rows"]
                more["rules"] = (Rule("rows", 0), Rule("columns", 1), Rule("free", None))
            optimizer = ortho(w, more.pop("rotation", "hadamard"), **more)
            for p in w.values():
                p.grad = torch.ones_like(p)
            optimizer.step()
            return optimizer.state_dict()

        return make

    def adamw() -> dict[str, Any]:
        w = weights()
        return torch.optim.AdamW(w.items()).state_dict()

    def two_groups() -> dict[str, Any]:
        groups = decay_groups(weights().items(), weight_decay=0.1)
        return OrthoAdam(groups, rules=RULES).state_dict()

    def other_shape() -> dict[str, Any]:
        saved = of()()
        saved["state"][3]["exp_avg"] = torch.zeros(6)
        return saved

    def no_moment() -> dict[str, Any]:
        saved = of()()
        del saved["state"][0]["exp_avg_sq"]
        return saved

    return {
        "seed": (of(seed=1), "rows is of another rotation: hadamard.*seed=1.*saved.*seed=0"),
        "rotation": (of(rotation="haar"), "rows is of another rotation: haar"),
        "identity": (of(rotation="identity"), "rows is of another rotation: identity saved"),
        "width": (of(width=24), "width=24"),
        "sides": (of(sides="both"), "another rotation"),
        "share": (of(share=True), "another rotation"),
        "order": (of(renamed=True), "another rotation"),
        "adamw": (adamw, "names no rotations"),
        "groups": (two_groups, "other parameter groups"),
        "shape": (other_shape, r"bias has shape \(6,\), the parameter \(5,\)"),
        "moment": (no_moment, "rows holds no exp_avg_sq"),
    }


@pytest.mark.parametrize("case", list(wrong_states()))
def test_a_state_of_another_is_refused_and_nothing_changes(case: str) -> None:
    make, message = wrong_states()[case]
    saved = make()
    w = weights()
    optimizer = ortho(w, "hadamard")
    train(w, optimizer, 3)
    before = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(WakefulError, match=message):
        optimizer.load_state_dict(saved)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for key, state in before["state"].items():
        assert all(torch.equal(value, after["state"][key][name]) for name, value in state.items())
