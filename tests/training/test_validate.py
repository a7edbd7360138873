"""The validation loss: whose it is, and how sure."""

import contextlib
import itertools
import math
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
import torch.nn.functional as F

from training.runs import tiny, write_text
from training.test_loop import stop_after
from wakeful.config.schema import Config
from wakeful.data.order import ValidationWindows
from wakeful.data.preparing import load_data
from wakeful.model.decoder import Decoder
from wakeful.reports.html import write_page
from wakeful.training.compared import read_comparison
from wakeful.training.loop import train_run
from wakeful.training.objective import make_loss
from wakeful.training.report import comparison_report
from wakeful.training.setup import make_decoder, resolve_config
from wakeful.training.validation import mean_loss, window_losses


def with_data(text: Path, **over: dict) -> tuple[Config, Decoder, ValidationWindows]:
    config = tiny(text, **over)
    data = load_data(config.data)
    windows = ValidationWindows(
        data.validation, length=config.train.length, batch_size=config.train.eval_batch_size
    )
    decoder = make_decoder(resolve_config(config, data), torch.device("cpu"))
    with torch.no_grad():  # far from the uniform start, so that tokens differ in loss
        for parameter in decoder.parameters():
            parameter.mul_(8)
    return config, decoder, windows


def scored(decoder: Decoder, windows: ValidationWindows) -> pl.DataFrame:
    return window_losses(decoder, windows, contextlib.nullcontext())


@pytest.mark.slow
def test_each_token_counts_once_and_by_the_definition(text: Path) -> None:
    _, decoder, windows = with_data(text, train={"dtype": "float64"})
    tokens = torch.from_numpy(windows.token_file.tokens.astype(np.int64))
    expected: list[float] = []
    counts: list[int] = []
    for start in range(0, len(tokens) - 1, 16):
        inputs, targets = tokens[start : start + 16], tokens[start + 1 : start + 17]
        size = len(targets)
        padded = F.pad(inputs[:size], (0, 16 - size))
        logits = decoder(padded[None]).detach()[0, :size].log_softmax(-1)
        losses = -logits[torch.arange(size), targets]
        expected.append(float(losses.mean()))
        counts.append(len(losses))
    frame = scored(decoder, windows)
    assert frame["tokens"].to_list() == counts
    assert frame["loss"].to_list() == pytest.approx(expected, rel=1e-9)
    assert sum(counts) == len(tokens) - 1
    loss, _ = mean_loss(frame)
    assert loss == pytest.approx(np.average(expected, weights=counts), rel=1e-9)
    assert max(expected) - min(expected) > 0.5


@pytest.mark.slow
def test_the_set_and_its_loss_hang_on_nothing_but_text_and_length(text: Path) -> None:
    _, decoder, windows = with_data(text)
    other_config, _, one_at_a_time = with_data(
        text, train={"seed": 5, "batch_size": 2, "eval_batch_size": 1}
    )
    assert other_config.train.seed == 5
    frame, expected = scored(decoder, windows), scored(decoder, one_at_a_time)
    assert expected["tokens"].equals(frame["tokens"])
    assert expected["loss"].to_list() == pytest.approx(frame["loss"].to_list(), rel=1e-5)
    assert scored(decoder, windows).equals(frame)


def test_evaluation_leaves_the_model_as_it_was(text: Path) -> None:
    _, decoder, windows = with_data(text)
    for mode in (True, False):
        decoder.train(mode)
        scored(decoder, windows)
        assert decoder.training is mode
        assert all(parameter.grad is None for parameter in decoder.parameters())


def test_the_standard_error_by_hand() -> None:
    frame = pl.DataFrame({"window": [0, 1, 2], "loss": [2.0, 3.0, 5.0], "tokens": [10, 10, 5]})
    loss, error = mean_loss(frame)
    # (20 + 30 + 25) / 25 = 3; residuals 20 − 30, 30 − 30, 25 − 15.
    assert loss == pytest.approx(3.0)
    assert error == pytest.approx(math.sqrt(3 / 2 * (100 + 0 + 100)) / 25)
    loss, error = mean_loss(frame[:1])
    assert loss == 2.0
    assert math.isnan(error)


def test_the_standard_error_is_that_of_other_draws() -> None:
    generator = np.random.default_rng(0)
    sizes = generator.integers(4, 17, 60)
    means, errors = [], []
    for _ in range(600):
        losses = 3 + generator.normal(size=60) / np.sqrt(sizes)
        frame = pl.DataFrame({"window": range(60), "loss": losses, "tokens": sizes})
        mean, error = mean_loss(frame)
        means.append(mean)
        errors.append(error)
    assert np.std(means) == pytest.approx(np.mean(errors), rel=0.1)


def test_the_whole_of_the_held_out_text_is_read(text: Path, tmp_path: Path) -> None:
    held = write_text(tmp_path / "held", documents=2, words=33)
    (held / "000.txt").write_text("layer value " * 20)
    (held / "001.txt").write_text("range self " * 20)
    config, decoder, windows = with_data(text, data={"validation_source": str(held)})
    tokenizer = load_data(config.data).tokenizer
    stored = [int(token) for token in windows.token_file.tokens]
    first, second = (tokenizer.encode((held / f"00{n}.txt").read_text()) for n in (0, 1))
    end = [tokenizer.end_of_text]
    assert stored in ([*first, *end, *second, *end], [*second, *end, *first, *end])
    assert scored(decoder, windows)["tokens"].sum() == len(stored) - 1


@pytest.mark.slow
def test_where_documents_are_kept_apart_each_is_as_if_alone(text: Path) -> None:
    config, decoder, windows = with_data(
        text, train={"dtype": "float64"}, data={"cross_documents": False}
    )
    end = windows.token_file.end_of_text
    tokens = torch.from_numpy(windows.token_file.tokens.astype(np.int64))
    assert int((tokens == end).sum()) > 3
    expected: list[float] = []
    for start in range(0, len(tokens) - 1, 16):
        inputs, targets = tokens[start : start + 16], tokens[start + 1 : start + 17]
        inputs = inputs[: len(targets)]
        begins = [0, *(n for n in range(1, len(inputs)) if inputs[n] == end), len(inputs)]
        document_losses = [
            F.cross_entropy(decoder(inputs[None, a:b]).detach()[0], targets[a:b], reduction="none")
            for a, b in itertools.pairwise(begins)
        ]
        expected.append(float(torch.cat(document_losses).mean()))
    frame = window_losses(decoder, windows, contextlib.nullcontext(), cross_documents=False)
    assert frame["loss"].to_list() == pytest.approx(expected, rel=1e-9)
    assert frame["loss"].to_list() != pytest.approx(scored(decoder, windows)["loss"].to_list())
    # The training loss is of the same kind.
    inputs, targets = windows.batch(0)
    loss = make_loss(config, decoder, torch.device("cpu"), end_of_text=end)(inputs, targets)
    assert loss.item() == pytest.approx(mean_loss(frame[: len(inputs)])[0], rel=1e-9)


@pytest.mark.slow
def test_a_run_that_keeps_documents_apart_says_so_and_resumes_to_the_bit(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"data": {"cross_documents": False}, "train": {"steps": 5, "checkpoint_every": 2}}
    uninterrupted = train_run(tiny(text, **changes), tmp_path / "whole")
    assert uninterrupted.config.data.cross_documents is False
    crossing = train_run(tiny(text, train=changes["train"]), tmp_path / "crossing")
    assert crossing.metrics()[0]["loss"] != uninterrupted.metrics()[0]["loss"]
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(RuntimeError, match="stop"):
            train_run(tiny(text, **changes), tmp_path / "cut")
    cut = train_run(Config(), tmp_path / "cut", resume=True)
    assert [row["loss"] for row in cut.metrics()] == [
        row["loss"] for row in uninterrupted.metrics()
    ]
    for run, word in ((uninterrupted, "false"), (crossing, "true")):
        page = write_page(
            comparison_report(read_comparison(run.path), title="t"), tmp_path / "page.html"
        )
        assert f"cross_documents = {word}" in page.read_text("utf-8")
