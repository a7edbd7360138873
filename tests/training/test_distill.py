"""Distillation: the formula by hand, both forms, and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import some_tokens, tiny_decoder
from wakeful.config.schema import config_from_table
from wakeful.errors import WakefulError
from wakeful.training.distillation import (
    Distillation,
    StoredDistillation,
    distillation_loss,
)
from wakeful.training.objective import check_distill
from wakeful.training.stored import About, Store

TOKENS = some_tokens(2, 9)


def by_hand(student, teacher, targets, alpha: float, temperature: float, over: str) -> float:
    """Return the loss in numpy, token by token."""
    total, count = 0.0, 0
    for s, t, target in zip(
        student.reshape(-1, student.shape[-1]), teacher.reshape(-1, student.shape[-1]),
        targets.reshape(-1), strict=True,
    ):  # fmt: skip
        if target < 0:
            continue
        q = np.exp(s / temperature) / np.exp(s / temperature).sum()
        p = np.exp(t / temperature) / np.exp(t / temperature).sum()
        hard = -np.log(np.exp(s) / np.exp(s).sum())[target]
        terms = p * np.log(p / q)
        soft = terms.sum() if over == "sum" else terms.mean()
        total += alpha * hard + (1 - alpha) * temperature**2 * soft
        count += 1
    return total / count


@pytest.mark.parametrize("over", ["sum", "mean"])
@pytest.mark.parametrize(("alpha", "temperature"), [(0.6, 1.0), (0.0, 2.5), (1.0, 1.0)])
def test_the_formula(over: str, alpha: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 2, 5, 11, generator=generator, dtype=torch.float64) * 2
    targets = torch.randint(11, (2, 5), generator=generator)
    targets[1, 3:] = -100
    found = distillation_loss(
        student, teacher, targets, alpha=alpha, temperature=temperature, over=over
    )
    expected = by_hand(student.numpy(), teacher.numpy(), targets.numpy(), alpha, temperature, over)
    assert float(found) == pytest.approx(expected, rel=1e-12)


def test_float32_logits_are_not_lost() -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 1, 5, 50, generator=generator) * 4
    targets = torch.randint(50, (1, 5), generator=generator)
    options = {"alpha": 0.3, "temperature": 1.0, "over": "sum"}
    exactly = distillation_loss(student.double(), teacher.double(), targets, **options)
    assert float(distillation_loss(student, teacher, targets, **options)) == pytest.approx(
        float(exactly), rel=1e-5
    )


def test_a_student_that_is_its_teacher_pays_only_cross_entropy() -> None:
    teacher = tiny_decoder()
    student = tiny_decoder()
    for over in ("sum", "mean"):
        made = Distillation(student, teacher, alpha=0.6, temperature=1.0, over=over)
        loss = made.loss(TOKENS[:, :-1], TOKENS[:, 1:])
        plain = student.loss(TOKENS[:, :-1], TOKENS[:, 1:])
        assert loss.item() == pytest.approx(0.6 * plain.item(), rel=1e-6)
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_the_gradient_points_to_the_teacher() -> None:
    teacher, student = tiny_decoder(seed=1), tiny_decoder(seed=2)
    made = Distillation(student, teacher, alpha=0.0, temperature=1.0, over="sum")
    before = made.loss(TOKENS[:, :-1], TOKENS[:, 1:])
    before.backward()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.sub_(parameter.grad, alpha=1e-4)
    assert made.loss(TOKENS[:, :-1], TOKENS[:, 1:]) < before


def test_a_relaxed_prefix_is_left_out() -> None:
    teacher = tiny_decoder(relaxed_prefix=4)
    student = tiny_decoder(relaxed_prefix=4, seed=3)
    made = Distillation(student, teacher, alpha=1.0, temperature=1.0, over="sum")
    loss = made.loss(TOKENS[:, :-1], TOKENS[:, 1:])
    assert loss.item() == pytest.approx(student.loss(TOKENS[:, :-1], TOKENS[:, 1:]).item())


def test_targets_that_the_teacher_sees_are_left_out(tmp_path: Path) -> None:
    teacher, student = tiny_decoder(relaxed_prefix=4), tiny_decoder(seed=3)
    inputs, targets = TOKENS[:, :-1], TOKENS[:, 1:].clone()
    options = {"alpha": 0.3, "temperature": 1.0}
    left = targets.clone()
    left[:, :3] = -100
    with torch.no_grad():
        wanted = distillation_loss(student(inputs), teacher(inputs), left, over="sum", **options)
        live = Distillation(student, teacher, over="sum", **options).loss(inputs, targets)
        kind = About(
            teacher="x", vocabulary=29, top_k=29, temperature=1.0, length=inputs.shape[1],
            dtype="float64", end_of_text=-1,
        )  # fmt: skip
        store = Store(kind, tmp_path)
        stored = StoredDistillation(student, teacher, store, alpha=0.3, rest="bucket")
        assert stored.loss(inputs, targets).item() == pytest.approx(wanted.item())
    assert live.item() == pytest.approx(wanted.item())


@pytest.mark.usefixtures("as_users_run_it")
def test_what_is_refused() -> None:
    student = tiny_decoder()
    with pytest.raises(WakefulError, match="vocabulary of 30 tokens is not the student's of 29"):
        Distillation(student, tiny_decoder(vocab_size=30), alpha=0.6, temperature=1.0, over="sum")
    for options in ({"alpha": 1.1}, {"temperature": 0.0}):
        given = {"alpha": 0.6, "temperature": 1.0, "over": "sum"} | options
        with pytest.raises(WakefulError, match="alpha must be between 0 and 1"):
            Distillation(student, tiny_decoder(), **given)
    with pytest.raises(WakefulError, match="over must be one of sum, mean"):
        Distillation(student, tiny_decoder(), alpha=0.6, temperature=1.0, over="max")


def test_streams_are_matched_behind_the_layers_named() -> None:
    teacher, student = tiny_decoder(num_layers=4), tiny_decoder(num_layers=2)
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.add_(0.01)
    options = {"alpha": 0.3, "temperature": 2.0, "over": "sum"}
    plain = Distillation(student, teacher, **options).loss(TOKENS, TOKENS)
    made = Distillation(student, teacher, hidden=0.7, layers=(1, 3), **options)
    found = made.loss(TOKENS, TOKENS)

    def behind(decoder, layer: int) -> torch.Tensor:
        seen = []
        handle = decoder.blocks[layer].register_forward_hook(lambda _, __, out: seen.append(out[0]))
        decoder(TOKENS)
        handle.remove()
        return seen[0]

    expected = 0.0
    for ours, theirs in ((0, 1), (1, 3)):
        x, y = behind(student, ours), behind(teacher, theirs)
        expected += ((x - y).square().sum(-1) / y.square().sum(-1)).mean() / 2
    torch.testing.assert_close(found, plain + 0.7 * expected)
    found.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert student.blocks[0].mlp.down.weight.grad is not None


def test_fields_that_would_do_nothing_are_refused() -> None:
    def check(**distill: object) -> None:
        check_distill(config_from_table({"train": {"distill": distill}}))

    for given in ({}, {"teacher": "x", "hidden": 1.0, "layers": [0]}, {"teacher": "x", "top_k": 3}):
        check(**given)
    for given in ({"hidden": 1.0}, {"top_k": 3}, {"layers": [0]}, {"hidden": 1.0, "layers": [0]}):
        with pytest.raises(WakefulError, match="does nothing without a teacher"):
            check(**given)
    with pytest.raises(WakefulError, match=r"train\.distill\.hidden = 0 matches none"):
        check(teacher="x", layers=[0, 1])


def test_streams_that_cannot_be_matched_are_refused() -> None:
    options = {"alpha": 0.0, "temperature": 1.0, "over": "sum", "hidden": 1.0}
    teacher = tiny_decoder(num_layers=4)
    for layers in ((), (0,), (0, 4)):
        with pytest.raises(WakefulError, match=r"distill\.layers"):
            Distillation(
                tiny_decoder(num_layers=5 - len(layers)), teacher, layers=layers, **options
            )
    with pytest.raises(WakefulError, match="channels"):
        Distillation(tiny_decoder(width=64), tiny_decoder(), **options)
