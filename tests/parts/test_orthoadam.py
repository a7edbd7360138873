"""OrthoAdam in one file: the steps of `wakeful.optim.OrthoAdam`, to the bit."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wakeful.parts
from helpers import some_tokens
from hf.softmax1_models import build
from optim.test_optim_axes import FRAMEWORKS, MODELS, OTHERS
from wakeful.optim import OrthoAdam as Reference
from wakeful.optim.axes import plain_name
from wakeful.parts.orthoadam import OrthoAdam

pytestmark = pytest.mark.filterwarnings("ignore:OrthoAdam does not know")


def trained(make: Any, dtype: torch.dtype, steps: int, **options: Any) -> tuple[Any, Any]:
    """Return a small Llama and its optimizer after some steps."""
    model = build("llama", "eager").to(dtype)
    optimizer = make(model, lr=1e-2, **options)
    train(model, optimizer, steps)
    return model, optimizer


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> None:
    tokens = some_tokens(2, 9)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rotation", ["hadamard", "haar"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("kernel", ["foreach", "chunked"])
def test_steps_are_the_librarys_to_the_bit(
    dtype: torch.dtype, rotation: str, weight_decay: float, kernel: str
) -> None:
    options: dict[str, Any] = {"weight_decay": weight_decay, "rotation": rotation}
    start = build("llama", "eager").to(dtype)
    model, _ = trained(OrthoAdam, dtype, 5, **options)
    reference, _ = trained(Reference, dtype, 5, kernel=kernel, **options)
    for weight, other, before in zip(
        model.parameters(), reference.parameters(), start.parameters(), strict=True
    ):
        assert torch.equal(weight, other)
        assert not torch.equal(weight, before)


@pytest.mark.parametrize("kind", [*MODELS, *OTHERS])
def test_models_of_transformers_have_the_librarys_axes(kind: str) -> None:
    with torch.device("meta"):
        model = (MODELS | OTHERS)[kind]()
    plan = {line.name: line.axes for line in Reference(model).plan() if len(line.shape) == 2}
    tables = {name for name in plan if "relative_attention_bias" in name}  # in no stream
    found = OrthoAdam(model).axes
    assert {name: (axis,) for name, axis in found.items() if name not in tables} == {
        name: axes for name, axes in plan.items() if name not in tables
    }


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_other_frameworks_have_the_librarys_axes(framework: str) -> None:
    _, shapes = FRAMEWORKS[framework]
    named = [(name, nn.Parameter(torch.empty(shape))) for name, shape in shapes.items()]
    plan = {plain_name(line.name): line.axes for line in Reference(named).plan() if line.axes}
    found = OrthoAdam(named).axes
    assert {name: (found[name],) for name in plan} == plan


def test_without_names_a_warning_tells_of_axis_1() -> None:
    model = nn.Linear(4, 3)
    with pytest.warns(UserWarning, match="knows none of these names"):
        optimizer = OrthoAdam(model.parameters())
    assert optimizer.axes == {"parameter 0": 1}
    assert OrthoAdam(model, axes={"weight": 0}).axes == {"weight": 0}
    with pytest.raises(ValueError, match="'hadamard' or 'haar'"):
        OrthoAdam(model, rotation="block_diagonal")


@pytest.mark.parametrize("other", [OrthoAdam, Reference])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_state_resumes_to_the_bit_here_and_in_the_library(other: Any, dtype: torch.dtype) -> None:
    whole = trained(OrthoAdam, dtype, 6)
    model, optimizer = trained(OrthoAdam, dtype, 3)
    resumed = other(model, lr=1e-2)
    resumed.load_state_dict(optimizer.state_dict())
    train(model, resumed, 3)
    for weight, expected in zip(model.parameters(), whole[0].parameters(), strict=True):
        assert torch.equal(weight, expected)


def test_a_state_of_another_seed_is_refused() -> None:
    model, optimizer = trained(OrthoAdam, torch.float32, 1)
    with pytest.raises(ValueError, match="other names, seeds, axes or rotations"):
        OrthoAdam(model, seed=1).load_state_dict(optimizer.state_dict())


def test_wrapped_models_keep_their_rotations() -> None:
    model = build("llama", "eager").float()
    wrapped = {"module._orig_mod." + name: p for name, p in model.named_parameters()}
    assert OrthoAdam(wrapped.items()).axes == OrthoAdam(model).axes


@pytest.mark.slow
def test_the_file_needs_torch_alone(tmp_path: Path) -> None:
    for name in ("orthoadam", "softmax1"):
        path = Path(wakeful.parts.__path__[0]) / f"{name}.py"
        (tmp_path / path.name).write_bytes(path.read_bytes())
    program = (
        "import sys; import orthoadam, softmax1; "
        "assert not {'wakeful', 'transformers', 'numpy.testing', 'jaxtyping'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
