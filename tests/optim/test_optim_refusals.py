"""What OrthoAdam refuses, and that nothing changes then."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from optim.problems import WIDTH, ortho, train, weights
from wakeful.errors import WakefulError
from wakeful.optim import OrthoAdam

pytestmark = pytest.mark.filterwarnings("ignore:OrthoAdam does not know")
"""The axes of these small weights are of no concern here."""


def test_a_sparse_gradient_is_refused() -> None:
    embedding = nn.Embedding(5, 4, sparse=True)
    optimizer = OrthoAdam([("embed.weight", embedding.weight)])
    embedding(torch.tensor([1, 2])).sum().backward()
    before = embedding.weight.detach().clone()
    with pytest.raises(WakefulError, match=r"embed.weight is sparse"):
        optimizer.step()
    assert torch.equal(before, embedding.weight)


def test_refusals_at_the_start() -> None:
    w = weights()
    with pytest.raises(WakefulError, match="axes has 'none'"):
        OrthoAdam(w.items(), axes={"none": 1})
    with pytest.raises(WakefulError, match=r"axes has a tensor of shape \(2,\)"):
        OrthoAdam(w.values(), axes={torch.zeros(2): 1})
    for choice in (2, (0, 0), (0, 1, 1)):
        with pytest.raises(WakefulError, match=r"axes = .* of rows, whose shape is \(7, 12\)"):
            OrthoAdam(w.items(), axes={"rows": choice})
    with pytest.raises(WakefulError, match=r"axes = 0 of bias"):
        OrthoAdam(w.items(), axes={"bias": 0})
    with pytest.raises(WakefulError, match="w is complex"):
        OrthoAdam([("w", nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64)))])
    with pytest.raises(WakefulError, match="spin"):
        ortho(w, "spin")
    with pytest.raises(WakefulError, match="block_diagonal has no option 'block'"):
        ortho(w, "block_diagonal(block=3)")
    with pytest.raises(WakefulError, match="kernel='fast'"):
        ortho(w, "haar", kernel="fast")
    with pytest.raises(WakefulError, match="sides='one'"):
        ortho(w, "haar", sides="one")
    with pytest.raises(WakefulError, match="two parameters have the same name"):
        OrthoAdam([("rows", w["rows"]), ("rows", w["columns"])])


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("lr", -1.0),
        ("lr", math.nan),
        ("lr", math.inf),
        ("weight_decay", math.nan),
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


def test_a_group_that_does_not_fit_is_not_added() -> None:
    w = weights()
    optimizer = ortho(w, "hadamard")
    late = nn.Parameter(torch.zeros(2, WIDTH))
    with pytest.raises(WakefulError, match="lr=-1"):
        optimizer.add_param_group({"params": [("late", late)], "lr": -1.0})
    assert len(optimizer.param_groups) == 1
    optimizer.add_param_group({"params": [("late", late)]})
    assert len(optimizer.param_groups) == 2
    assert [line.axes for line in optimizer.plan()] == [(1,), (0,), (), (), (), (1,)]
    train(w, optimizer, 1)
