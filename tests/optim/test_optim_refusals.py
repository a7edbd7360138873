"""What OrthoAdam refuses, and that nothing changes then."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from optim.problems import (
    KERNELS,
    RULES,
    WIDTH,
    assert_same,
    ortho,
    train,
    weights,
)
from wakeful.errors import WakefulError
from wakeful.optim.orthoadam import OrthoAdam
from wakeful.optim.sides import Rule


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_bad_gradient_refuses_the_step(kernel: str, bad: float) -> None:
    w = weights(torch.float32)
    optimizer = ortho(w, "hadamard", kernel=kernel)
    train(w, optimizer, 2)
    before = {name: p.detach().clone() for name, p in w.items()}
    moments = copy.deepcopy(optimizer.state_dict()["state"])
    grad = w["columns"].grad
    assert grad is not None
    grad[2, 3] = bad
    with pytest.raises(WakefulError, match=r"gradient of columns holds .*nothing changed"):
        optimizer.step()
    assert_same(w, before, 0)
    for key, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, moments[key][name]) for name, value in state.items())
    grad[2, 3] = 0.0
    optimizer.step()
    assert not torch.equal(w["rows"], before["rows"])


def test_a_huge_finite_gradient_is_no_bad_gradient() -> None:
    w = {"rows": nn.Parameter(torch.randn(3, 4))}
    w["rows"].grad = torch.full((3, 4), 1e18)
    w["rows"].grad[0, 0] = 3e38  # its square overflows, and so does the norm
    ortho(w, "identity")._refuse_bad_gradients([w["rows"]])


def test_a_sparse_gradient_is_refused() -> None:
    embedding = nn.Embedding(5, 4, sparse=True)
    optimizer = OrthoAdam([("embed.weight", embedding.weight)], rules=[Rule(r"embed\.weight", 1)])
    embedding(torch.tensor([1, 2])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(WakefulError, match=r"embed.weight is sparse"):
        optimizer.step()
    assert torch.equal(before, embedding.weight)


def test_refusals_at_the_start() -> None:
    w = weights()
    with pytest.raises(WakefulError, match="needs parameter names"):
        OrthoAdam(w.values(), rules=RULES)
    OrthoAdam(w.values(), rotation="identity")
    with pytest.raises(WakefulError, match="no table of rotation rules"):
        OrthoAdam(w.items())
    with pytest.raises(WakefulError, match="match no parameter: 'none'"):
        OrthoAdam(w.items(), rules=[*RULES, Rule("none", 1)])
    with pytest.raises(WakefulError, match="w is complex"):
        OrthoAdam([("w", nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64)))], rules=RULES)
    with pytest.raises(WakefulError, match="rotation='spin' is not one of"):
        ortho(w, "spin")
    with pytest.raises(WakefulError, match="'size'; block_diagonal takes block"):
        ortho(w, "block_diagonal", rotation_options={"size": 3})
    with pytest.raises(WakefulError, match="share=True cannot go with eigenbasis"):
        ortho(w, "eigenbasis", share=True)
    with pytest.raises(WakefulError, match="kernel='fast'"):
        ortho(w, "haar", kernel="fast")
    with pytest.raises(WakefulError, match="rules='t5'"):
        ortho(w, "haar", rules="t5")
    with pytest.raises(WakefulError, match="sides='one'"):
        ortho(w, "haar", sides="one")
    with pytest.raises(WakefulError, match="two parameters have the same name"):
        OrthoAdam([("rows", w["rows"]), ("rows", w["columns"])], rules=[Rule("rows", 1)])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", -1.0),
        ("lr", math.nan),
        ("betas", (1.0, 0.9)),
        ("betas", (0.9, -0.1)),
        ("eps", 0.0),
        ("eps", math.inf),
        ("weight_decay", -0.1),
    ],
)
def test_values_out_of_range(option: str, value: Any) -> None:
    with pytest.raises(WakefulError, match="must be"):
        ortho(weights(), "hadamard", **{option: value})


def test_a_rotation_wider_than_memory_is_refused() -> None:
    wide = nn.Parameter(torch.zeros(1, 1).expand(1, 3_000_000))
    with pytest.raises(WakefulError, match=r"haar rotations, up to 3000000 wide, need .* GB"):
        OrthoAdam([("w", wide)], rotation="haar", rules=[Rule("w", 1)])
    OrthoAdam([("w", wide)], rotation="hadamard", rules=[Rule("w", 1)])


def test_a_group_that_does_not_fit_is_not_added() -> None:
    w = weights()
    optimizer = ortho(w, "hadamard")
    late = nn.Parameter(torch.zeros(3, 3))
    with pytest.raises(WakefulError, match="no rotation rule matches late"):
        optimizer.add_param_group({"params": [("late", late)]})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [("x.rows", nn.Parameter(torch.zeros(2, WIDTH)))]})
    assert len(optimizer.param_groups) == 2
    train(w, optimizer, 1)
