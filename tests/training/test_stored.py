"""Stored predictions of a teacher: the loss, its gradient, and what a folder holds and refuses."""

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers import some_tokens, tiny_decoder
from training.runs import tiny
from wakeful.config.schema import DistillConfig
from wakeful.data.order import Batches
from wakeful.errors import WakefulError
from wakeful.loading.load import read_decoder
from wakeful.loading.model import Model
from wakeful.model.decoder import Decoder
from wakeful.training.distillation import StoredDistillation, distillation_loss, top_k_loss
from wakeful.training.loop import train
from wakeful.training.stored import About, Store, digest_of, top_k

V = 30


def logits(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, 2, 5, V, generator=generator, dtype=dtype) * 3


def targets() -> torch.Tensor:
    found = torch.randint(V, (2, 5), generator=torch.Generator().manual_seed(1))
    found[1, 3:] = -100
    return found


def about(**changes) -> About:
    given = {
        "teacher": "x", "vocabulary": V, "top_k": 4, "temperature": 1.0, "length": 9,
        "dtype": "float32", "end_of_text": -1,
    }  # fmt: skip
    return About(**{**given, **changes})


@pytest.mark.parametrize("rest", ["bucket", "renormalize"])
@pytest.mark.parametrize(("alpha", "temperature"), [(0.0, 1.0), (0.3, 2.5)])
def test_all_tokens_are_the_live_loss_and_its_gradient(
    rest: str, alpha: float, temperature: float
) -> None:
    student, teacher = logits()
    ours, theirs = (student.clone().requires_grad_(True) for _ in range(2))
    stored = top_k(teacher, V, temperature)
    options = {"alpha": alpha, "temperature": temperature}
    found = top_k_loss(ours, stored, targets(), rest=rest, **options)
    live = distillation_loss(theirs, teacher, targets(), over="sum", **options)
    torch.testing.assert_close(found, live, rtol=1e-12, atol=1e-12)
    found.backward()
    live.backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-11, atol=1e-13)


def test_the_bucket_by_hand_and_its_gradient_inside() -> None:
    student, teacher = logits()
    student.requires_grad_(True)
    everywhere = torch.zeros(2, 5, dtype=torch.long)
    found = top_k_loss(
        student, top_k(teacher, 4, 2.0), everywhere, alpha=0.0, temperature=2.0, rest="bucket"
    )
    q, p = (student / 2).softmax(-1), (teacher / 2).softmax(-1)
    expected = torch.zeros((), dtype=torch.float64)
    inside = torch.zeros_like(p, dtype=torch.bool).scatter(-1, p.topk(4).indices, True)
    expected = (torch.where(inside, p * (p / q).log(), 0)).sum(-1)
    p_rest, q_rest = (torch.where(inside, 0, part).sum(-1) for part in (p, q))
    expected = 4 * (expected + p_rest * (p_rest / q_rest).log()).mean()
    torch.testing.assert_close(found, expected)
    (gradient,) = torch.autograd.grad(found, student)
    torch.testing.assert_close(gradient[inside], (2 * (q - p) / 10)[inside])


def test_the_renormalized_form_by_hand() -> None:
    student, teacher = logits()
    stored = top_k(teacher, 4, 1.0)
    found = top_k_loss(
        student, stored, torch.zeros(2, 5, dtype=torch.long), alpha=0.0, temperature=1.0,
        rest="renormalize",
    )  # fmt: skip
    p = stored.kept.exp() / stored.kept.exp().sum(-1, keepdim=True)
    expected = (p * (p / student.softmax(-1).gather(-1, stored.ids)).log()).sum(-1).mean()
    torch.testing.assert_close(found, expected)


def test_a_student_that_agrees_pays_nothing_however_sure_both_are() -> None:
    sure = torch.full((1, 3, V), -40.0)
    sure[..., 7] = 40.0
    student = sure.clone().requires_grad_(True)
    found = top_k_loss(
        student, top_k(sure, 4, 1.0), torch.zeros(1, 3, dtype=torch.long), alpha=0.0,
        temperature=1.0,
    )  # fmt: skip
    found.backward()
    assert float(found.detach()) == pytest.approx(0, abs=1e-6)
    assert student.grad is not None
    assert student.grad.abs().max() < 1e-6


@pytest.mark.parametrize("vocabulary", [V, 2**16 + 1])
def test_what_was_put_is_got_by_another_process_too(tmp_path: Path, vocabulary: int) -> None:
    rows = some_tokens(3, 9)
    generator = torch.Generator().manual_seed(0)
    found = top_k(torch.randn(3, 9, vocabulary, generator=generator), 4, 1.0)
    kind = about(vocabulary=vocabulary)
    first = Store(kind, tmp_path / "s")
    assert not (tmp_path / "s").exists()
    first.put(rows[:2], type(found)(*(part[:2] for part in found)))
    second = Store(kind, tmp_path / "s")
    second.put(rows[2:], type(found)(*(part[2:] for part in found)))
    again = Store(kind, tmp_path / "s")
    order = torch.tensor([2, 0, 1])
    for ours, theirs in zip(again.get(rows[order]), found, strict=True):
        assert torch.equal(ours, theirs[order])
    assert some_tokens(4, 9)[3] not in again
    assert rows[0, :5] not in again


def test_a_record_cut_short_is_as_good_as_absent(tmp_path: Path) -> None:
    rows = some_tokens(2, 9)
    store = Store(about(), tmp_path)
    store.put(rows, top_k(torch.randn(2, 9, V), 4, 1.0))
    (file,) = tmp_path.glob("*.rows")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    assert [row in Store(about(), tmp_path) for row in rows] == [True, False]
    file.write_bytes(whole[:-32] + bytes(32))  # a file system that kept the length alone
    assert [row in Store(about(), tmp_path) for row in rows] == [True, False]


@pytest.mark.parametrize(
    "changes", [{"teacher": "y"}, {"top_k": 5}, {"temperature": 2.0}, {"length": 8},
                {"dtype": "bfloat16"}, {"end_of_text": 0}, {"vocabulary": 31}],
)  # fmt: skip
def test_a_folder_of_other_predictions_is_refused(tmp_path: Path, changes: dict) -> None:
    Store(about(), tmp_path).put(some_tokens(1, 9), top_k(torch.randn(1, 9, V), 4, 1.0))
    (name,) = changes
    with pytest.raises(WakefulError, match=f"holds predictions with {name} = "):
        Store(about(**changes), tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(WakefulError, match="something else"):
        Store(about(), tmp_path)


def test_the_cache_has_a_folder_for_each_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path))
    one, other = Store(about()), Store(about(top_k=5))
    assert one.path.parent == other.path.parent == tmp_path / "predictions"
    assert one.path != other.path


def test_the_digest_is_of_the_weights() -> None:
    assert digest_of(tiny_decoder()) == digest_of(tiny_decoder())
    assert digest_of(tiny_decoder()) == digest_of(tiny_decoder().double())
    other = tiny_decoder()
    with torch.no_grad():
        other.blocks[0].mlp.down.weight[0, 0] += 1e-4
    assert digest_of(other) != digest_of(tiny_decoder())


def test_a_teacher_computes_only_what_is_missing_and_is_let_go(tmp_path: Path) -> None:
    teacher, tokens = tiny_decoder(), some_tokens(4, 9)
    asked = []
    teacher.register_forward_pre_hook(lambda _, args: asked.append(len(args[0])))
    kind = about(vocabulary=teacher.config.vocab_size, dtype="float64")
    student = tiny_decoder()

    def distillation() -> StoredDistillation:
        read = []

        def again():
            read.append(1)
            return teacher

        made = StoredDistillation(
            student, teacher, Store(kind, tmp_path), DistillConfig(alpha=0.0), again=again
        )
        made.read = read  # pyright: ignore
        return made

    first = distillation()
    first.predicted(tokens[:2])
    found = first.predicted(tokens[:3])
    assert asked == [2, 1]
    later = distillation()
    torch.testing.assert_close(later.predicted(tokens[:3]), found, rtol=0, atol=0)
    assert asked == [2, 1]
    assert later._teacher is None
    later.predicted(tokens)
    assert asked == [2, 1, 1]
    assert later.read == [1]  # pyright: ignore
    loss = later.loss(tokens, tokens)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(0, abs=1e-12)  # the student is the teacher


def test_the_teacher_is_let_go_once_all_windows_have_been_there(tmp_path: Path) -> None:
    teachers, tokens = [], some_tokens(6, 9)

    def again() -> Decoder:
        teachers.append(weakref.ref(read := tiny_decoder()))
        return read

    kind = about(vocabulary=tiny_decoder().config.vocab_size, dtype="float64")
    made = StoredDistillation(
        tiny_decoder(), again(), Store(kind, tmp_path), DistillConfig(alpha=0.0), again=again
    )

    def held_after(*rows: int) -> bool:
        made.predicted(tokens[list(rows)])
        gc.collect()
        return teachers[-1]() is not None

    # An epoch of four windows fills the store, across the batch in which the next one begins.
    assert [held_after(0, 1), held_after(2), held_after(3, 0)] == [True] * 3
    assert not held_after(1, 2)
    assert not held_after(3)
    assert len(teachers) == 1
    # Rows of another text need it again, and it stays until these come a second time.
    assert [held_after(4), held_after(0), held_after(5)] == [True] * 3
    assert len(teachers) == 2
    assert not held_after(4, 0)
    assert len(teachers) == 2


@pytest.mark.parametrize("fixed", [True, False])
def test_a_run_that_fills_its_store_goes_on_without_the_teacher(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixed: bool
) -> None:
    teacher = train(tiny(text), tmp_path / "teacher").path
    held: list[bool] = []
    read = weakref.WeakSet()

    def known(*given: Any, **options: Any) -> Model:
        model = read_decoder(*given, **options)
        read.add(model.decoder())
        return model

    monkeypatch.setattr(sys.modules["wakeful.loading.load"], "read_decoder", known)
    batch = Batches.batch

    def counted(self: Batches, step: int) -> torch.Tensor:
        gc.collect()
        held.append(bool(read))
        return batch(self, step)

    monkeypatch.setattr(Batches, "batch", counted)
    learns = {"teacher": str(teacher), "top_k": 4, "store": str(tmp_path / "store")}
    # Six windows, three a step: the third step's come a second time.
    source = {"max_tokens": 6 * 16, "fixed_windows": fixed}
    config = tiny(text, data=source, train={"distill": learns, "steps": 5, "batch_size": 3})
    train(config, tmp_path / "student")
    assert held == [True] * 3 + [not fixed] * 2


def test_documents_are_the_teachers_too(tmp_path: Path) -> None:
    teacher, tokens = tiny_decoder(), some_tokens(2, 9)
    kind = about(vocabulary=teacher.config.vocab_size, dtype="float64")
    documents = (torch.arange(9) > 4).long().expand(2, 9)
    made = StoredDistillation(
        tiny_decoder(), teacher, Store(kind, tmp_path), DistillConfig(alpha=0.0)
    )
    found = made.predicted(tokens, documents)
    expected = top_k(teacher(tokens, documents=documents), 4, 1.0)
    torch.testing.assert_close(found, expected)
