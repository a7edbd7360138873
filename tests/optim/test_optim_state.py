"""OrthoAdam's checkpoints: what they hold, and whose they must be."""

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from optim.problems import AXES, ROTATIONS, WIDTH, assert_same, ortho, train, weights
from wakeful.errors import WakefulError
from wakeful.optim import LearnedRotation, OrthoAdam, decay_groups

pytestmark = pytest.mark.filterwarnings("ignore:OrthoAdam does not know")
"""The axes of these small weights are of no concern here."""


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("rotation", [*ROTATIONS, "block_diagonal(size=5)"])
def test_a_checkpoint_goes_on_bit_for_bit(rotation: str, named: bool, dtype: torch.dtype) -> None:
    w = weights(dtype)
    optimizer = ortho(w, rotation, named=named)
    train(w, optimizer, 13)
    saved = through_a_file(optimizer.state_dict())
    w2 = {name: nn.Parameter(p.detach().clone()) for name, p in w.items()}
    optimizer2 = ortho(w2, rotation, named=named)
    optimizer2.load_state_dict(saved)
    train(w, optimizer, 12, start=13)
    train(w2, optimizer2, 12, start=13)
    assert_same(w, w2, 0)
    optimizer2.load_state_dict(saved)  # into an optimizer that has a state already
    assert float(optimizer2.state[w2["rows"]]["step"]) == 13
    for a, b in zip(optimizer.param_groups, optimizer2.param_groups, strict=True):
        assert a["rotations"] == b["rotations"]


class Reflected(LearnedRotation):
    """A learned rotation with a state of its own: the reflection that a gradient's sum gives."""

    examples = ("reflected",)

    def draw(
        self, width: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.normal = torch.zeros(width, device=device, dtype=dtype)

    def into(self, grad: torch.Tensor) -> torch.Tensor:
        return grad - 2 * (grad @ self.normal).unsqueeze(1) * self.normal

    def back(self, step: torch.Tensor) -> torch.Tensor:
        return self.into(step)

    def learn(self, grad: torch.Tensor) -> torch.Tensor:
        before = self.into(torch.eye(grad.shape[1], dtype=grad.dtype))
        self.normal.copy_(nn.functional.normalize(self.normal + grad.sum(0), dim=0))
        return self.into(before)

    def state(self) -> dict[str, torch.Tensor]:
        return {"normal": self.normal}


def test_a_rotation_from_outside_may_learn_another_state() -> None:
    w = weights()
    optimizer = ortho(w, Reflected())
    train(w, optimizer, 3)
    saved = through_a_file(optimizer.state_dict())
    w2 = {name: nn.Parameter(p.detach().clone()) for name, p in w.items()}
    optimizer2 = ortho(w2, Reflected())
    optimizer2.load_state_dict(saved)
    train(w, optimizer, 3, start=3)
    train(w2, optimizer2, 3, start=3)
    assert_same(w, w2, 0)


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
                more["axes"] = {"rows": 0, "free": ()}
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
        return OrthoAdam(groups, axes=AXES).state_dict()

    return {
        "seed": (of(seed=1), "rows is of another rotation: hadamard.*seed=1.*saved.*seed=0"),
        "rotation": (of(rotation="haar"), "rows is of another rotation: haar"),
        "identity": (of(rotation="identity"), "rows is of another rotation: identity saved"),
        "width": (of(width=24), "width=24"),
        "sides": (of(axes={"rows": (1, 0), "columns": 0, "free": ()}), "another rotation"),
        "names": (of(named=False), "another rotation: .*name='parameter 0'"),
        "size": (of(rotation="block_diagonal(size=4)"), r"block_diagonal\(size=4\)\(seed=0"),
        "order": (of(renamed=True), "another rotation"),
        "adamw": (adamw, "names no rotations"),
        "groups": (two_groups, "other parameter groups"),
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


def test_without_names_the_order_is_what_counts() -> None:
    """As with torch's optimizers: another order is noticed where shapes differ, and only there."""
    w = weights()
    optimizer = ortho(w, "hadamard", named=False)
    train(w, optimizer, 1)
    saved = optimizer.state_dict()
    assert [len(r) and r[0]["name"] for r in saved["param_groups"][0]["rotations"]] == [
        "parameter 0", "parameter 1", 0, 0, 0,
    ]  # fmt: skip
    turned = {name: w[name] for name in ("columns", "rows", "free", "bias", "scale")}
    with pytest.raises(WakefulError, match="parameter 0 is of another rotation"):
        ortho(turned, "hadamard", named=False).load_state_dict(saved)
    twins = [nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.ones(2, 3))]
    one = OrthoAdam(twins)
    OrthoAdam(twins[::-1]).load_state_dict(one.state_dict())


@pytest.mark.parametrize("change", ["vectors", "identity"])
def test_other_names_are_refused_where_no_rotation_tells(change: str) -> None:
    def made(names: dict[str, str]) -> OrthoAdam:
        shapes = {"rows": (3, 4), "other": (3, 4), "bias": (5,), "scale": (5,)}
        w = {
            names.get(name, name): nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()
        }
        more: dict[str, Any] = {"rotation": "identity"} if change == "identity" else {}
        optimizer = OrthoAdam(w.items(), **more)
        for p in w.values():
            p.grad = torch.ones_like(p)
        optimizer.step()
        return optimizer

    one, two = ("bias", "scale") if change == "vectors" else ("rows", "other")
    saved = made({one: two, two: one}).state_dict()
    with pytest.raises(WakefulError, match=f"the state has {two} where this optimizer has {one}"):
        made({}).load_state_dict(saved)
    wrapped = made({name: f"_orig_mod.{name}" for name in ("rows", "other", "bias", "scale")})
    made({}).load_state_dict(wrapped.state_dict())
