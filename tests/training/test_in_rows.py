"""Losses a few rows at a time against their definitions: values, gradients, types, odd sizes."""

import pytest
import torch
from torch import Tensor

from wakeful.training.distillation import distillation_in_rows, distillation_loss


def draw_logits(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Return a student's and a teacher's logits (3, 5, 13) and targets, some not counted."""
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 3, 5, 13, generator=generator, dtype=torch.float64) * 3
    targets = torch.randint(13, (3, 5), generator=generator)
    targets[1, 2:] = -100
    return student.to(dtype).requires_grad_(), teacher.to(dtype), targets


def value_and_gradient(loss: Tensor, student: Tensor) -> tuple[float, Tensor]:
    (gradient,) = torch.autograd.grad(loss, student)
    return loss.item(), gradient


def assert_equal(actual: Tensor, reference: Tensor, student: Tensor) -> None:
    """Fail unless two losses and their gradients are the same but for float64's rounding."""
    (value, gradient), (expected, slope) = (
        value_and_gradient(loss, student) for loss in (actual, reference)
    )
    assert value == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(gradient, slope, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("rows", [0, 1, 4, 15, 64])
@pytest.mark.parametrize("over", ["sum", "mean"])
@pytest.mark.parametrize(("alpha", "temperature"), [(0.0, 1.0), (0.6, 1.0), (0.3, 2.5), (1.0, 2.0)])
def test_the_whole_divergence(rows: int, over: str, alpha: float, temperature: float) -> None:
    student, teacher, targets = draw_logits()
    options = {"alpha": alpha, "temperature": temperature, "over": over}
    expected = distillation_loss(student, teacher, targets, **options)
    actual = distillation_in_rows(student, teacher, targets, **options, rows=rows)
    assert_equal(actual, expected, student)


@pytest.mark.slow
def test_its_gradient_is_its_slope() -> None:
    student, teacher, targets = draw_logits()

    def loss_of_all(logits: Tensor) -> Tensor:
        return distillation_in_rows(
            logits, teacher, targets, alpha=0.3, temperature=1.7, over="sum", rows=4
        )

    assert torch.autograd.gradcheck(loss_of_all, student)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_logits_are_read_in_float32(dtype: torch.dtype) -> None:
    student, teacher, targets = draw_logits(dtype)
    options = {"alpha": 0.3, "temperature": 1.0, "over": "sum"}
    expected = value_and_gradient(distillation_loss(student, teacher, targets, **options), student)
    loss = distillation_in_rows(student, teacher, targets, **options, rows=4)
    actual = value_and_gradient(loss, student)
    assert loss.dtype == torch.float32
    assert actual[1].dtype == dtype
    assert actual[0] == pytest.approx(expected[0], rel=1e-5)
    torch.testing.assert_close(actual[1], expected[1])


def test_the_teacher_learns_nothing_and_a_scaled_loss_scales() -> None:
    student, teacher, targets = draw_logits()
    teacher.requires_grad_()
    options = {"alpha": 0.0, "temperature": 1.0, "over": "sum"}
    loss = distillation_in_rows(student, teacher, targets, **options)
    once = torch.autograd.grad(loss, student, retain_graph=True)[0]
    torch.testing.assert_close(
        torch.autograd.grad(3 * loss, student, retain_graph=True)[0], 3 * once
    )
    loss.backward(retain_graph=True)
    torch.testing.assert_close(student.grad, once)
    loss.backward()
    torch.testing.assert_close(student.grad, 2 * once)
    assert teacher.grad is None
    with torch.no_grad():
        assert distillation_in_rows(student, teacher, targets, **options).item() == loss.item()
