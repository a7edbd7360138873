"""Distillation: the formula by hand, both forms, and what it refuses."""

from importlib import import_module
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from helpers import some_tokens, tiny_decoder
from wakeful.config.schema import DistillConfig, config_from_table
from wakeful.config.tables import merge_tables
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.runs.distributed import World
from wakeful.training import objective
from wakeful.training.distillation import Distillation, Over, distillation_loss
from wakeful.training.objective import make_loss

TOKENS = some_tokens(2, 9)
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 5, [0] * 7 + [1] * 2])


def other_targets() -> torch.Tensor:
    """Return targets of TOKENS, some of which are not counted."""
    targets = some_tokens(2, 9, seed=4)
    targets[1, 2:5] = -100
    return targets


def divergence(p: np.ndarray, q: np.ndarray, how: str) -> float:
    """Return KL(p ‖ q), gathered as `over` has it."""
    terms = p * np.log(p / q)
    return terms.mean() if how == "mean" else terms.sum()


def by_hand(student, teacher, targets, alpha: float, temperature: float, how: str) -> float:
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
        total += alpha * hard + (1 - alpha) * temperature**2 * divergence(p, q, how)
        count += 1
    return total / count


@pytest.mark.parametrize("over", ["sum", "mean"])
@pytest.mark.parametrize(("alpha", "temperature"), [(0.6, 1.0), (0.0, 2.5), (1.0, 1.0)])
def test_the_formula(over: str, alpha: float, temperature: float) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = torch.randn(2, 2, 5, 11, generator=generator, dtype=torch.float64) * 2
    targets = torch.randint(11, (2, 5), generator=generator)
    targets[1, 3:] = -100
    actual = distillation_loss(
        student, teacher, targets, alpha=alpha, temperature=temperature, over=over
    )
    expected = by_hand(student.numpy(), teacher.numpy(), targets.numpy(), alpha, temperature, over)
    assert float(actual) == pytest.approx(expected, rel=1e-12)


def predictions(*decoders: Decoder, documents: torch.Tensor | None) -> list[np.ndarray]:
    with torch.no_grad():
        return [decoder(TOKENS, documents=documents).numpy() for decoder in decoders]


@pytest.mark.parametrize("over", ["sum", "mean"])
def test_the_loss_is_the_formula_of_what_both_models_predict(over: Over) -> None:
    student, teacher = tiny_decoder(seed=2), tiny_decoder(seed=1)
    distillation = Distillation(
        student, teacher, DistillConfig(alpha=0.3, temperature=2.5, over=over)
    )
    for documents in (DOCUMENTS, None):
        student_logits, teacher_logits = predictions(student, teacher, documents=documents)
        expected = by_hand(student_logits, teacher_logits, other_targets().numpy(), 0.3, 2.5, over)
        actual = distillation.loss(TOKENS, other_targets(), documents=documents)
        assert actual.item() == pytest.approx(expected, rel=1e-12)


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
        distillation = Distillation(student, teacher, DistillConfig(over=over))
        loss = distillation.loss(TOKENS[:, :-1], TOKENS[:, 1:])
        plain = student.loss(TOKENS[:, :-1], TOKENS[:, 1:])
        assert loss.item() == pytest.approx(0.6 * plain.item(), rel=1e-6)
    loss.backward()
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert all(parameter.grad is not None for parameter in student.parameters())


def test_the_gradient_points_to_the_teacher() -> None:
    teacher, student = tiny_decoder(seed=1), tiny_decoder(seed=2)
    distillation = Distillation(student, teacher, DistillConfig(alpha=0.0))
    before = distillation.loss(TOKENS[:, :-1], TOKENS[:, 1:])
    before.backward()
    with torch.no_grad():
        for parameter in student.parameters():
            parameter.sub_(parameter.grad, alpha=1e-4)
    assert distillation.loss(TOKENS[:, :-1], TOKENS[:, 1:]) < before


@pytest.mark.usefixtures("as_users_run_it")
def test_what_is_refused() -> None:
    student = tiny_decoder()
    with pytest.raises(WakefulError, match="of 28 tokens is smaller than the student's of 29"):
        Distillation(student, tiny_decoder(vocab_size=28), DistillConfig())


@pytest.mark.parametrize("over", ["sum", "mean"])
def test_a_configurations_loss_is_the_formula(over: str) -> None:
    teacher, student = tiny_decoder(num_layers=4, seed=1), tiny_decoder(num_layers=2, seed=2)
    distill = {"teacher": "given", "alpha": 0.3, "temperature": 2.0, "over": over}
    config = config_from_table({"train": {"distill": distill}})
    loss = make_loss(config, student, torch.device("cpu"), end_of_text=0, teacher=teacher)
    actual, teacher_logits = predictions(student, teacher, documents=None)
    expected = by_hand(actual, teacher_logits, other_targets().numpy(), 0.3, 2.0, over)
    assert loss(TOKENS, other_targets()).item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
    ("train", "device_type"),
    [({}, "cpu"), ({"parallel": "ddp"}, "meta")],
)
def test_a_teacher_that_comes_to_be_in_shares_is_read_into_main_memory(
    train: dict, device_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Mock()
    read.return_value.decoder.return_value = tiny_decoder(seed=1)
    monkeypatch.setattr(import_module("wakeful.loading.load"), "read_decoder", read)
    shared = Mock(side_effect=lambda teacher, *_: teacher)
    monkeypatch.setattr(objective, "shard_model", shared)
    lesson = {"teacher": "read"}
    config = config_from_table({"train": merge_tables({"distill": lesson}, train)})
    device = torch.device("meta")  # in the place of an accelerator
    make_loss(config, tiny_decoder(seed=2), device, World(size=2), end_of_text=0)
    assert read.call_args.kwargs["device"].type == device_type
    assert shared.called == (device_type == "cpu")


@pytest.mark.parametrize("over", ["sum", "mean"])
def test_a_teachers_padded_rows_are_left_out(over: str) -> None:
    """A teacher of 40 tokens says to a student of 29 what it would with the 29 first alone."""
    student, teacher = tiny_decoder(seed=2), tiny_decoder(seed=1, vocab_size=40)
    with torch.no_grad():
        teacher.head.weight[29:] += 1.0
    distill = {"teacher": "given", "alpha": 0.3, "temperature": 2.0, "over": over}
    config = config_from_table({
        "model": {"vocab_size": 29},
        "train": {"distill": distill, "length": 9, "dtype": "float64"},
    })  # fmt: skip
    loss = make_loss(config, student, torch.device("cpu"), end_of_text=0, teacher=teacher)
    with torch.no_grad():
        actual, teacher_logits = (model(TOKENS).numpy() for model in (student, teacher))
    expected = by_hand(actual, teacher_logits[..., :29], other_targets().numpy(), 0.3, 2.0, over)
    assert loss(TOKENS, other_targets()).item() == pytest.approx(expected, rel=1e-12)
