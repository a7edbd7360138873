"""SOAP and Shampoo as the exhibits name them, against their definitions."""

import pytest
import torch
from torch import Tensor, nn

from wakeful.optim.build import build_optimizer

BETA1, BETA2, EPS, LR, DECAY = 0.8, 0.9, 1e-8, 3e-2, 0.1
pytest.importorskip("pytorch_optimizer")


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
    weight = torch.ones(5, 3, dtype=torch.float64)
    left = 1e-6 * torch.eye(5, dtype=torch.float64)
    right = 1e-6 * torch.eye(3, dtype=torch.float64)
    for gradient in gradients(6):
        left, right = left + gradient @ gradient.T, right + gradient.T @ gradient
        weight = weight * (1 - LR * DECAY)
        weight = weight - LR * root(left, -0.25) @ gradient @ root(right, -0.25)
    torch.testing.assert_close(
        trained("pytorch_optimizer:Shampoo(weight_decouple=True)", 6), weight, rtol=0, atol=1e-6
    )


def test_soap_is_adam_in_the_eigenbasis() -> None:
    """While the basis of the first step stays, before it is turned."""
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
    found = trained(
        "pytorch_optimizer:SOAP(precondition_frequency=100)", 6, betas=(BETA1, BETA2), eps=EPS
    )
    # A matrix of five rows and three columns has two directions without a gradient at first, whose
    # basis is any: what lies in them is left out.
    seen = left[:, 2:]
    torch.testing.assert_close(seen.T @ found, seen.T @ weight, rtol=0, atol=1e-9)


def test_soaps_basis_turns_by_a_power_iteration() -> None:
    """Vyas et al. 2024, algorithms 3 and 4: sums of squares that decay, and QR every other step."""
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
    found = trained(
        "pytorch_optimizer:SOAP(precondition_frequency=2)", 9, 4, 4, betas=(BETA1, BETA2), eps=EPS
    )
    # The library takes its QR decompositions in float32.
    torch.testing.assert_close(found, weight, rtol=0, atol=1e-6)
    other = trained(
        "pytorch_optimizer:SOAP(precondition_frequency=100)", 9, 4, 4, betas=(BETA1, BETA2), eps=EPS
    )
    assert (other - weight).abs().max() > 1e-3
