"""Runs that start from given weights, and runs with a teacher."""

import dataclasses
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from training.runs import tiny, write_text
from wakeful.config.schema import Config
from wakeful.data.order import Batches, ValidationWindows
from wakeful.data.preparing import load_data
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import Interrupted, WakefulError
from wakeful.hf.weights_out import export_decoder
from wakeful.inheritance.blocks import inherit_blocks
from wakeful.inheritance.layers import first
from wakeful.loading.load import read_decoder
from wakeful.model.decoder import Decoder
from wakeful.runs import checkpoint
from wakeful.runs.run import Run
from wakeful.terminal.display import Display
from wakeful.training.distillation import distillation_loss
from wakeful.training.loop import Initial, train_run
from wakeful.training.setup import autocast, check_run, make_decoder
from wakeful.training.validation import mean_loss, window_losses

ORIGIN = {"reference": "a run", "layers": [0]}


@pytest.fixture
def reference(text: Path, tmp_path: Path) -> Run:
    """Give a run that was trained for a few steps."""
    return train_run(tiny(text), tmp_path / "reference")


def heir(reference: Run, layers: int = 1) -> Decoder:
    return inherit_blocks(read_decoder(reference.path, dtype="auto").decoder(), first(layers, of=2))


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.newest_checkpoint(run.checkpoints) / "model.safetensors")


def config_for(text: Path, decoder: Decoder, **train: object) -> Config:
    config = tiny(text, train=train)
    return dataclasses.replace(config, model=decoder.config)


def stop_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let SIGTERM arrive while a step is under way."""
    real = Batches.batch

    def batch(self: Batches, number: int) -> torch.Tensor:
        if number == step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(self, number)

    monkeypatch.setattr(Batches, "batch", batch)


@pytest.mark.slow
def test_a_run_starts_from_the_weights_it_is_given(
    text: Path, tmp_path: Path, reference: Run
) -> None:
    start = heir(reference)
    originals = {name: tensor.clone() for name, tensor in start.state_dict().items()}
    config = config_for(text, start, steps=4, keep_checkpoints=9)
    run = train_run(config, tmp_path / "heir", initial=Initial(start, ORIGIN))
    assert run.header.initial == ORIGIN
    assert run.config.model.num_layers == 1
    stored = load_file(run.checkpoints / "step-00000000" / "model.safetensors")
    for name, tensor in stored.items():
        assert torch.equal(tensor, originals[name]), name
    rows = [row for row in run.metrics() if row["kind"] == "validation"]
    assert [row["step"] for row in rows] == [0, 3, 4]
    data = load_data(config.data)
    windows = ValidationWindows(data.validation, length=16, batch_size=16)
    frame = window_losses(heir(reference), windows, autocast(config.train, torch.device("cpu")))
    assert rows[0]["loss"] == pytest.approx(mean_loss(frame)[0], rel=1e-6)
    assert read_decoder(run.path, dtype="auto").decoder().config.num_layers == 1


@pytest.mark.slow
@pytest.mark.parametrize("stop", [1, 3, 5])
def test_an_interrupted_heir_ends_as_if_it_had_not_been(
    text: Path, tmp_path: Path, reference: Run, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_for(text, heir(reference))
    uninterrupted = train_run(config, tmp_path / "whole", initial=Initial(heir(reference), ORIGIN))
    with monkeypatch.context() as patch:
        stop_after(patch, stop)
        with pytest.raises(Interrupted, match="continue with"):
            train_run(config, tmp_path / "cut", initial=Initial(heir(reference), ORIGIN))
    cut = train_run(config, tmp_path / "cut", resume=True)
    assert [(row["step"], row.get("loss")) for row in cut.metrics()] == [
        (row["step"], row.get("loss")) for row in uninterrupted.metrics()
    ]
    for name, tensor in weights(uninterrupted).items():
        assert torch.equal(tensor, weights(cut)[name]), name


@pytest.mark.slow
def test_a_run_that_died_before_its_first_checkpoint_starts_from_the_weights(
    text: Path, tmp_path: Path, reference: Run
) -> None:
    config = config_for(text, heir(reference), keep_checkpoints=9)
    uninterrupted = train_run(config, tmp_path / "whole", initial=Initial(heir(reference), ORIGIN))
    run = train_run(config, tmp_path / "cut", initial=Initial(heir(reference), ORIGIN))
    for step in (3, 6, 8):
        shutil.rmtree(run.checkpoints / f"step-{step:08d}")
    assert checkpoint.steps(run.checkpoints) == [0]
    resumed = train_run(config, run.path, resume=True)
    rows = [row for row in resumed.metrics() if row["kind"] == "validation"]
    assert [row["step"] for row in rows] == [0, 3, 6, 8]
    for name, tensor in weights(uninterrupted).items():
        assert torch.equal(tensor, weights(resumed)[name]), name


@pytest.mark.slow
def test_a_larger_vocabulary_is_kept_and_a_smaller_refused(text: Path, tmp_path: Path) -> None:
    config = tiny(text)
    data = load_data(config.data)
    for extra in (7, -1):
        model = dataclasses.replace(config.model, vocab_size=data.vocab_size + extra)
        options = dataclasses.replace(config, model=model)
        out = tmp_path / f"run{extra}"
        if extra < 0:
            with pytest.raises(WakefulError, match="vocabularies differ"):
                train_run(options, out, initial=Initial(Decoder(model), ORIGIN))
            assert not out.exists()
            continue
        run = train_run(options, out, initial=Initial(Decoder(model), ORIGIN))
        assert run.config.model.vocab_size == data.vocab_size + 7
        assert train_run(options, out, resume=True).header.status == "done"


@pytest.mark.slow
def test_a_teacher_is_in_the_loss(text: Path, tmp_path: Path, reference: Run) -> None:
    teacher = {"teacher": str(reference.path), "alpha": 0.3, "temperature": 2.0}
    config = tiny(text, train={"distill": teacher, "steps": 2, "dtype": "float64"})
    run = train_run(config, tmp_path / "student")
    plain = train_run(tiny(text, train={"steps": 2, "dtype": "float64"}), tmp_path / "plain")
    data = load_data(config.data)
    batch = Batches(data.train, length=16, batch_size=4, seed=0).batch(0)
    student = read_decoder(plain.path, dtype="auto").decoder().double()
    start = make_decoder(plain.config, torch.device("cpu"))
    expected = distillation_loss(
        start(batch[:, :-1]),
        read_decoder(reference.path, dtype="auto").decoder().double()(batch[:, :-1]),
        batch[:, 1:],
        alpha=0.3,
        temperature=2.0,
        over="sum",
    )
    rows = [row for row in run.metrics() if row["kind"] == "train"]
    assert rows[0]["loss"] == pytest.approx(expected.item(), rel=1e-9)
    # The validation loss stays the cross-entropy.
    final = read_decoder(run.path, dtype="auto").decoder()
    windows = ValidationWindows(data.validation, length=16, batch_size=16)
    frame = window_losses(final, windows, autocast(config.train, torch.device("cpu")))
    assert mean_loss(frame)[0] == pytest.approx(
        run.read_json("summary.json")["validation"]["loss"], rel=1e-6
    )
    assert student.config == final.config


def cut_and_resumed(config: Config, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Train a run that is stopped after its fourth step and resumed."""
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(Interrupted):
            train_run(config, folder)
    return train_run(config, folder, resume=True)


@pytest.mark.slow
def test_a_student_resumes_with_its_teacher(
    text: Path, tmp_path: Path, reference: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(text, train={"distill": {"teacher": str(reference.path)}})
    uninterrupted = train_run(config, tmp_path / "whole")
    cut = cut_and_resumed(config, tmp_path / "cut", monkeypatch)
    for name, tensor in weights(uninterrupted).items():
        assert torch.equal(tensor, weights(cut)[name]), name


@pytest.mark.slow
def test_a_teacher_of_another_vocabulary_is_refused(
    text: Path, tmp_path: Path, reference: Run
) -> None:
    config = tiny(
        text, data={"vocab_size": 270}, train={"distill": {"teacher": str(reference.path)}}
    )
    with pytest.raises(WakefulError, match="distill between models of one tokenizer"):
        train_run(config, tmp_path / "student")
    assert not (tmp_path / "student").exists()


@pytest.mark.slow
def test_a_teacher_with_a_padded_embedding_teaches_a_student_of_its_tokenizer(
    text: Path, tmp_path: Path
) -> None:
    """As Transformers' folders often are: 280 tokens, and an embedding of 384."""
    padded = train_run(tiny(text, model={"vocab_size": 384}), tmp_path / "padded")
    assert padded.config.model.vocab_size == 384
    assert weights(padded)["embed.weight"].shape == (384, 16)
    folder = tmp_path / "folder"
    export_decoder(
        read_decoder(padded.path).decoder(), folder, tokenizer=Tokenizer.load(str(padded.path))
    )
    config = tiny(text, train={"distill": {"teacher": str(folder), "alpha": 0.0}})
    student = train_run(config, tmp_path / "student")
    assert student.config.model.vocab_size == 280
    batch = Batches(load_data(config.data).train, length=16, batch_size=4, seed=0).batch(0)
    expected = read_decoder(folder).decoder()(batch[:, :-1])[..., :280].log_softmax(-1)
    start = make_decoder(student.config, torch.device("cpu"))
    actual = start(batch[:, :-1]).log_softmax(-1)
    divergence = (expected.exp() * (expected - actual)).sum(-1).mean().item()
    assert student.metrics()[0]["loss"] == pytest.approx(divergence, rel=1e-5)


@pytest.mark.slow
def test_a_vocabulary_of_ones_own_is_kept_or_refused(text: Path, tmp_path: Path) -> None:
    output: list[str] = []

    class Told(Display):
        def note(self, text: str) -> None:
            output.append(text)

    assert (
        train_run(
            tiny(text, model={"vocab_size": 300}), tmp_path / "more", show=Told()
        ).config.model.vocab_size
        == 300
    )
    assert "model.vocab_size = 300 is 20 more than the tokenizer has" in output[0]
    few = tiny(text, model={"vocab_size": 200})
    with pytest.raises(WakefulError, match=r"model\.vocab_size = 200 has no room for the 280"):
        train_run(few, tmp_path / "fewer")
    with pytest.raises(WakefulError, match=r"model\.vocab_size = 200 has no room for the 280"):
        check_run(few)
    assert not (tmp_path / "fewer").exists()


@pytest.mark.slow
def test_a_teacher_of_as_many_other_tokens_is_refused(
    text: Path, tmp_path: Path, reference: Run
) -> None:
    other_text = write_text(tmp_path / "other", documents=60, words=40)
    (other_text / "more.txt").write_text("zebra quartz juxtapose " * 400)
    config = tiny(other_text, train={"distill": {"teacher": str(reference.path)}})
    for begin in (lambda: train_run(config, tmp_path / "student"), lambda: check_run(config)):
        with pytest.raises(
            WakefulError, match="has another tokenizer, of 280 tokens, than the text, of 280"
        ):
            begin()
    assert not (tmp_path / "student").exists()
