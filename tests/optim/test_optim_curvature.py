"""SOAP and Shampoo against their definitions, and what becomes of their state."""

import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.optim.build import build_optimizer
from wakeful.runs import checkpoint

BETA1, BETA2, EPS, LR, DECAY = 0.8, 0.9, 1e-8, 3e-2, 0.1


def gradients(number: int, rows: int = 5, columns: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (rows, columns)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(number)]


def trained(name: str, steps: int, rows: int = 5, columns: int = 3, **options: object) -> Tensor:
    """Return a weight after steps along given gradients."""
    weight = nn.Parameter(torch.ones(rows, columns, dtype=torch.float64))
    optimizer = build_optimizer(name, [("w", weight)], weight_decay=DECAY, lr=LR, **options)
    for gradient in gradients(steps, rows, columns):
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach()


def root(matrix: Tensor, power: float) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values**power) @ vectors.T


def test_shampoo_is_its_definition() -> None:
    pytest.importorskip("pytorch_optimizer")
    weight = torch.ones(5, 3, dtype=torch.float64)
    left = 1e-6 * torch.eye(5, dtype=torch.float64)
    right = 1e-6 * torch.eye(3, dtype=torch.float64)
    for gradient in gradients(6):
        left, right = left + gradient @ gradient.T, right + gradient.T @ gradient
        weight = weight * (1 - LR * DECAY)
        weight = weight - LR * root(left, -0.25) @ gradient @ root(right, -0.25)
    torch.testing.assert_close(trained("shampoo", 6), weight, rtol=0, atol=1e-6)


def test_soap_is_adam_in_the_eigenbasis() -> None:
    """While the basis of the first step stays, before it is turned."""
    pytest.importorskip("pytorch_optimizer")
    first, *later = gradients(6)
    weight = torch.ones(5, 3, dtype=torch.float64)
    left, right = (torch.linalg.eigh(m)[1] for m in (first @ first.T, first.T @ first))
    mean = square = torch.zeros(5, 3, dtype=torch.float64)
    for number, gradient in enumerate(later, 1):
        mean = BETA1 * mean + (1 - BETA1) * gradient
        square = BETA2 * square + (1 - BETA2) * (left.T @ gradient @ right) ** 2
        turned = left.T @ mean @ right / (square.sqrt() + EPS)
        size = LR * (1 - BETA2**number) ** 0.5 / (1 - BETA1**number)
        weight = (weight - size * left @ turned @ right.T) * (1 - LR * DECAY)
    found = trained("soap(every=100)", 6, betas=(BETA1, BETA2), eps=EPS)
    # A matrix of five rows and three columns has two directions without a gradient at first, whose
    # basis is any: what lies in them is left out.
    seen = left[:, 2:]
    torch.testing.assert_close(seen.T @ found, seen.T @ weight, rtol=0, atol=1e-9)


def test_soaps_basis_turns_by_a_power_iteration() -> None:
    """Vyas et al. 2024, algorithms 3 and 4: sums of squares that decay, and QR every other step."""
    pytest.importorskip("pytorch_optimizer")
    first, *later = gradients(9, 4, 4)
    weight = torch.ones(4, 4, dtype=torch.float64)
    sums = [(1 - BETA2) * first @ first.T, (1 - BETA2) * first.T @ first]
    left, right = (torch.linalg.eigh(m)[1].flip(1) for m in sums)
    mean = square = torch.zeros(4, 4, dtype=torch.float64)
    still = left
    for number, gradient in enumerate(later, 1):
        mean = BETA1 * mean + (1 - BETA1) * gradient
        square = BETA2 * square + (1 - BETA2) * (left.T @ gradient @ right) ** 2
        turned = left.T @ mean @ right / (square.sqrt() + EPS)
        size = LR * (1 - BETA2**number) ** 0.5 / (1 - BETA1**number)
        weight = (weight - size * left @ turned @ right.T) * (1 - LR * DECAY)
        for side, product in enumerate((gradient @ gradient.T, gradient.T @ gradient)):
            sums[side] = BETA2 * sums[side] + (1 - BETA2) * product
        if number % 2 == 0:
            orders = [
                (basis.T @ total @ basis).diagonal().argsort(descending=True)
                for total, basis in zip(sums, (left, right), strict=True)
            ]
            square = square[orders[0]][:, orders[1]]
            left = torch.linalg.qr((sums[0] @ left)[:, orders[0]])[0]
            right = torch.linalg.qr((sums[1] @ right)[:, orders[1]])[0]
    assert (left - still).abs().max() > 0.1
    found = trained("soap(every=2)", 9, 4, 4, betas=(BETA1, BETA2), eps=EPS)
    # The library takes its QR decompositions in float32.
    torch.testing.assert_close(found, weight, rtol=0, atol=1e-6)
    other = trained("soap(every=100)", 9, 4, 4, betas=(BETA1, BETA2), eps=EPS)
    assert (other - weight).abs().max() > 1e-3


@pytest.mark.parametrize("widths", [(4, 6, 3), (8, 6, 9), (6, 16, 11)])
@pytest.mark.parametrize("name", ["soap(every=2)", "shampoo", "shampoo(every=2)"])
def test_a_checkpoint_goes_on_to_the_bit(
    name: str, widths: tuple[int, int, int], tmp_path: Path
) -> None:
    pytest.importorskip("pytorch_optimizer")
    width, hidden, out = widths

    def begun() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Linear(hidden, out))
        return model, build_optimizer(name, model.named_parameters(), lr=LR)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
        generator = torch.Generator().manual_seed(1)
        x, loss = torch.randn(5, width, generator=generator), torch.zeros(())
        for _ in range(number):
            optimizer.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
        return loss.item()

    model, optimizer = begun()
    step(model, optimizer, 5)
    saved = checkpoint.save(tmp_path, model, optimizer, checkpoint.RunProgress(step=5), keep=1)
    again, other = begun()
    checkpoint.load_model(saved, again)
    assert checkpoint.load_optimizer(saved, other).step == 5
    assert step(again, other, 5) == step(model, optimizer, 5)
    for one, two in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(one, two)


@pytest.mark.parametrize("name", ["soap", "shampoo"])
def test_a_checkpoint_in_another_order_is_refused(name: str, tmp_path: Path) -> None:
    """Parameters of one shape would take each other's squares."""
    pytest.importorskip("pytorch_optimizer")
    twins = nn.ParameterDict({"a": torch.ones(3, 3), "b": torch.ones(3, 3)})
    optimizer, turned = (
        build_optimizer(name, [(each, twins[each]) for each in order]) for order in ("ab", "ba")
    )
    saved = checkpoint.save(tmp_path, twins, optimizer, checkpoint.RunProgress(step=1), keep=1)
    with pytest.raises(WakefulError, match=r"whose param_names is \['a', 'b'\]"):
        checkpoint.load_optimizer(saved, turned)


@pytest.mark.parametrize("name", ["soap", "shampoo"])
def test_the_state_of_a_single_number_goes_on(name: str) -> None:
    pytest.importorskip("pytorch_optimizer")
    number = nn.Parameter(torch.tensor(1.0))
    optimizer = build_optimizer(name, [("number", number)], lr=LR)
    found = [number.item()]
    for _ in range(3):
        number.grad = torch.tensor(0.5)
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
        found.append(number.item())
    assert found[-1] < found[-2] < found[0]


def test_what_they_cannot_do_is_said_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = nn.Parameter(torch.ones(8193, 2))
    with pytest.raises(WakefulError, match="embed is 8193 wide, more than 8192: use soap"):
        build_optimizer("shampoo", [("embed", wide)])
    with pytest.raises(WakefulError, match="shampoo: every must be at least 1, got 0"):
        build_optimizer("shampoo(every=0)", [("w", nn.Parameter(torch.ones(2, 2)))])
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(WakefulError, match=r"soap needs .*pip install 'wakeful\[optimizers\]'"):
        build_optimizer("soap", [("w", nn.Parameter(torch.ones(2, 2)))])
