"""Tasks: windows that are drawn, what is known of them, and runs that train on them."""

import contextlib
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers import tiny_config
from training.runs import tiny, write_text
from wakeful.config.schema import Config
from wakeful.data import Batches, ValidationWindows, prepare, read_documents
from wakeful.data.preparing import load_data
from wakeful.data.tasks import Backcopy, TaskData, TaskStream, task_of
from wakeful.data.tokens import SplitName
from wakeful.errors import WakefulError
from wakeful.loading.load import load
from wakeful.model.decoder import Decoder
from wakeful.runs.records import DataFacts, data_facts
from wakeful.runs.run import Run
from wakeful.training.loop import train_run
from wakeful.training.validation import task_losses, window_losses
from wakeful.variants import build, variants_by_name

TEXT = "aab" * 20 + "c"  # closed to a circle: c is followed by a
EXAMPLES = [e for kind in variants_by_name("data.tasks").values() for e in kind.examples]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("tasks") / "text.txt"
    chosen = random.Random(0).choices("etaoin shrd", weights=range(22, 0, -2), k=5000)
    path.write_text("".join(chosen) + "fox")
    return str(path)


@pytest.fixture
def task(file: str) -> Backcopy:
    return Backcopy(triggers=2, text=file)


def small(tmp_path: Path, triggers: int) -> Backcopy:
    (tmp_path / "small.txt").write_text(TEXT)
    return Backcopy(triggers=triggers, text=str(tmp_path / "small.txt"))


def rows_of(
    task: Backcopy, split: SplitName = "train", count: int = 64, length: int = 65
) -> np.ndarray:
    return TaskStream(task, split).read(np.arange(count), length)


def text_of(task: Backcopy, row: np.ndarray) -> str:
    return "".join(task.characters[i - 1] for i in row[1:])


def test_a_table_by_hand(tmp_path: Path) -> None:
    task = small(tmp_path, triggers=1)
    assert task.characters == "abc"
    assert task.counts.tolist() == [[20, 20, 0], [19, 0, 1], [1, 0, 0]]
    assert task.counts.sum(0).tolist() == task.counts.sum(1).tolist()
    assert task.trigger_ids.tolist() == [1]  # a
    expected = [[0, 0, 20 / 21, 1 / 21], [0, 0.5, 0.5, 0], [0, 0.95, 0, 0.05], [0, 1, 0, 0]]
    assert np.abs(task.probabilities - expected).max() <= 2**-39
    assert (task.probabilities.sum(1) == 1).all()
    rows = np.array([[0, 2, 1, 2, 3, 1, 3]])  # BOS b a b c a c
    assert task.is_trigger(rows).tolist() == [[False, False, True, False, False, True, False]]
    p = task.probabilities
    assert task.losses(rows)[0] == pytest.approx(
        [-np.log(p[0, 2]), -np.log(p[2, 1]), 0, -np.log(p[2, 3]), 0, 0]
    )
    # What the process cannot draw has an infinite loss: another copy, a pair that never occurs.
    assert task.losses(np.array([[0, 2, 1, 3], [0, 3, 2, 2]]))[:, -1].tolist() == [np.inf, np.inf]


def test_rare_characters_are_taken_out_before_pairs_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abxabyab€cb")  # b 4, a 3; of x, y, c and the sign one each
    task = Backcopy(triggers=1, alphabet=3, text=str(path))
    assert task.characters == "abc"  # of equals the first
    assert task.counts.tolist() == [[0, 3, 0], [3, 0, 1], [0, 1, 0]]  # of ababab, then cb
    assert len(Backcopy().characters) == 96


def test_a_trigger_after_a_trigger_repeats_the_one_before(task: Backcopy) -> None:
    """No window holds the like, and what is known of rows holds for them too."""
    first, second = task.trigger_ids
    rows = np.array([[0, 5, first, second, first]])
    assert task.is_trigger(rows)[0].tolist() == [False, False, True, True, True]
    assert task.losses(rows)[0, -1] == 0
    drawn = task.is_trigger(rows_of(task, count=500))
    assert drawn.any()
    assert not (drawn[:, 1:] & drawn[:, :-1]).any()


def test_windows_begin_with_bos_and_copy_after_triggers(task: Backcopy) -> None:
    rows = rows_of(task, count=300)
    assert rows.dtype == np.int64
    assert (rows[:, 0] == 0).all()
    assert (rows[:, 1:] > 0).all()
    assert not task.is_trigger(rows)[:, :2].any()
    window, place = np.nonzero(task.is_trigger(rows)[:, :-1])
    assert (rows[window, place + 1] == rows[window, place - 1]).all()
    text = text_of(task, rows[0])
    assert set(text) <= set(task.characters)


def test_frequencies_are_those_of_the_table(task: Backcopy) -> None:
    rows = rows_of(task, count=3000, length=100)
    before, after = rows[:, :-1].ravel(), rows[:, 1:].ravel()
    free = ~task.is_trigger(before)
    size = len(task.characters) + 1
    counts = np.bincount(before[free] * size + after[free], minlength=size**2).reshape(size, -1)
    expected = task.probabilities * counts.sum(1, keepdims=True)
    assert not counts[expected == 0].any()
    likely = expected > 20
    chi_square = ((counts - expected) ** 2)[likely] / expected[likely]
    assert likely.sum() > 40
    assert chi_square.mean() == pytest.approx(1, abs=0.5)
    # The loss of the process is its entropy, in the mean over many windows.
    losses, p = task.losses(rows), task.probabilities
    of_pairs = -(p * np.log(np.where(p > 0, p, 1))).sum(1)
    entropies = np.where(task.is_trigger(before), 0, of_pairs[before]).reshape(losses.shape)
    error = (losses - entropies).std() / losses.size**0.5
    assert abs((losses - entropies).mean()) < 4 * error
    assert ((losses == 0) >= task.is_trigger(rows[:, :-1])).all()


def test_windows_are_drawn_alone(task: Backcopy) -> None:
    stream = TaskData(task).train
    rows = rows_of(task)
    assert (stream.read(np.array([7, 3]), 65) == rows[[7, 3]]).all()
    assert (stream.read(np.array([5]), 9) == rows[5:6, :9]).all()  # a shorter one is its beginning
    assert len({tuple(row) for row in rows}) == len(rows)
    held_out = {tuple(row) for row in rows_of(task, "validation")}
    assert not held_out & {tuple(row) for row in rows}


def test_seeds_steps_and_processes(task: Backcopy) -> None:
    stream = TaskData(task).train

    def batches(seed: int, rank: int = 0, world_size: int = 1) -> Batches:
        return Batches(stream, length=32, batch_size=8, seed=seed, rank=rank, world_size=world_size)

    whole = batches(0)
    seen = torch.cat([whole.batch(step) for step in range(50)] + [batches(1).batch(0)])
    assert seen.shape == (51 * 8, 33)
    assert len(seen.unique(dim=0)) == len(seen)
    shares = torch.cat([batches(0, rank, 4).batch(17) for rank in range(4)])
    assert torch.equal(shares, batches(0).batch(17))
    assert batches(0).batch(10**12).shape == (8, 33)


def test_validation_is_the_same_for_every_run(task: Backcopy, file: str) -> None:
    def windows(of: Backcopy) -> list[torch.Tensor]:
        stream = TaskData(of).validation
        return [inputs for inputs, _ in ValidationWindows(stream, length=64, batch_size=9)]

    ours, again = windows(task), windows(Backcopy(triggers=2, text=file))
    assert all(map(torch.equal, ours, again))
    assert sum(len(inputs) for inputs in ours) == 256
    assert (torch.cat(ours)[:, 0] == 0).all()


def test_the_best_loss_counts_real_targets_alone(task: Backcopy) -> None:
    stream = TaskData(task).validation
    windows = ValidationWindows(stream, length=100, batch_size=4)  # 2¹⁴ is no multiple of 100
    inputs, targets = windows.batch(len(windows) - 1)
    best = task_losses(stream, inputs, targets)
    assert best is not None
    assert best.isfinite().all()
    assert (best[targets == -100] == 0).all()
    whole = stream.read(np.array([(windows.num_windows - 1) * 100]), 101)
    real = int((targets[-1] != -100).sum())
    assert 0 < real < 100
    assert best[-1, :real].tolist() == task.losses(whole)[0, :real].tolist()


def test_the_tokenizer_knows_the_characters(task: Backcopy) -> None:
    tokenizer = task.tokenizer()
    assert tokenizer.vocab_size == len(task.characters) + 1
    assert tokenizer.encode("fox") == [task.characters.index(c) + 1 for c in "fox"]
    assert tokenizer.encode("f!ox") == tokenizer.encode("fox")
    assert tokenizer.decode(rows_of(task)[0].tolist()) == text_of(task, rows_of(task)[0])
    assert tokenizer.bos == tokenizer.end_of_text == tokenizer.start_token == 0
    assert tokenizer.adds_bos


def test_the_table_of_prepared_tokens(file: str, tmp_path: Path) -> None:
    data = prepare(file, tmp_path / "data", vocab_size=300, validation_fraction=0.1)
    text = data.tokenizer.decode(data.train.tokens[:-1].tolist())
    (tmp_path / "train.txt").write_text(text)
    ours = Backcopy(text=str(data.folder))
    theirs = Backcopy(text=str(tmp_path / "train.txt"))
    assert (ours.counts == theirs.counts).all()
    assert ours.sha256 == theirs.sha256 != Backcopy(triggers=2, text=theirs.text).sha256


@pytest.mark.parametrize("expression", EXAMPLES)
def test_every_example_is_a_task(expression: str) -> None:
    task = task_of(expression)
    assert task is not None
    assert str(build("data.tasks", str(task))) == str(task)
    rows = rows_of(task, count=16)
    assert np.isfinite(task.losses(rows)).all()
    assert task.is_trigger(rows).any()


def test_what_names_a_task() -> None:
    for text in ("python-stdlib", "notes(1)", "hf:a/b", "hf:name(x)", "a/b(1).txt", "some:Where"):
        assert task_of(text) is None
    with pytest.raises(WakefulError, match="did you mean 'backcopy'"):
        next(read_documents("backcpy(triggers=2)"))
    with pytest.raises(WakefulError, match="no option 'trigger'"):
        task_of("backcopy(trigger=2)")
    with pytest.raises(WakefulError, match="triggers = -1"):
        task_of("backcopy(triggers=-1)")


def test_texts_that_give_no_table(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("abab")
    with pytest.raises(WakefulError, match="has 2 characters, and triggers = 2 must be fewer"):
        _ = Backcopy(triggers=2, text=str(path)).characters
    for alphabet in (3, 2049):
        with pytest.raises(WakefulError, match=f"alphabet = {alphabet} must be more than triggers"):
            Backcopy(alphabet=alphabet)
    with pytest.raises(WakefulError, match="no such file"):
        _ = Backcopy(text=str(tmp_path / "missing.txt")).characters


class Oracle(Decoder):
    """A model that knows the task."""

    def __init__(self, task: Backcopy) -> None:
        super().__init__(tiny_config(vocab_size=len(task.characters) + 1))
        self.task = task

    def loss(self, tokens: torch.Tensor, targets: torch.Tensor, **_: object) -> torch.Tensor:
        rows = torch.cat([tokens[:, :1], targets.clamp(min=0)], 1).numpy()
        return torch.from_numpy(self.task.losses(rows)).where(targets != -100, 0.0)


def test_who_knows_the_task_has_no_excess(task: Backcopy) -> None:
    windows = ValidationWindows(TaskData(task).validation, length=100, batch_size=32)
    frame = window_losses(Oracle(task), windows, contextlib.nullcontext())
    assert frame["loss"].to_list() == pytest.approx(frame["optimal"].to_list(), abs=1e-12)
    assert frame["tokens"].sum() == 2**14
    # One that knows the pairs and no triggers loses more in every window.
    pairs = Backcopy(triggers=2, text=task.text)
    pairs._is_trigger_id = np.zeros(len(task.characters) + 1, bool)
    without = window_losses(Oracle(pairs), windows, contextlib.nullcontext())
    assert (without["loss"] > without["optimal"]).all()


def config_of(file: str, **over) -> Config:
    source = f"backcopy(triggers=2, text={file!r})"
    data = {"source": source, "vocab_size": 4096, "validation_fraction": 0.02}
    return tiny(Path(), data=data | over.pop("data", {}), **over)


@pytest.mark.slow
def test_a_run_on_a_task_resumes_to_the_bit(file: str, tmp_path: Path) -> None:
    config = config_of(file)
    run = train_run(config, tmp_path / "run")
    rows = [row for row in run.metrics() if row["kind"] == "train"]
    assert all(row["excess_loss"] > 0 for row in rows)
    validation = [row for row in run.metrics() if row["kind"] == "validation"]
    for row in validation:
        assert row["excess_loss"] == pytest.approx(row["loss"] - row["optimal_loss"])
        assert row["excess_loss"] > 10 * row["excess_standard_error"] > 0
    facts = run.read_json("data.json")
    assert facts["source"] == [f"backcopy(triggers=2, text={file!r})"]
    task = task_of(config.data.source)
    assert task is not None
    assert run.read(DataFacts, "data.json") == data_facts(TaskData(task))
    # A run that is stopped on the way goes on as if it had not been.
    copy = tmp_path / "copy"
    shutil.copytree(run.path, copy)
    shutil.rmtree(copy / "checkpoints" / "step-00000008")
    again = train_run(Config(), copy, resume=True)
    kept = ("step", "loss", "excess_loss", "grad_norm")
    assert [{k: row[k] for k in kept} for row in rows] == [
        {k: row[k] for k in kept} for row in again.metrics() if row["kind"] == "train"
    ]
    assert (copy / "validation.parquet").read_bytes() == (
        run.path / "validation.parquet"
    ).read_bytes()
    assert Run.open(copy).read_json("summary.json")["validation"]["excess_loss"] > 0


def test_fields_that_a_task_does_not_read_are_refused(file: str, tmp_path: Path) -> None:
    fields = {"max_bytes": 5, "max_tokens": 5, "keep_overlap": True, "validation_source": file}
    for field, value in fields.items():
        with pytest.raises(WakefulError, match=f"data.{field} = .* does nothing"):
            train_run(config_of(file, data={field: value}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_run_reads_the_first_tokens_alone_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    text = write_text(tmp_path / "text")
    whole, some = tiny(text), tiny(text, data={"max_tokens": 200})
    data = load_data(whole.data)
    batches = data.batches(some)
    assert batches.token_file.num_tokens == 200 < data.train.num_tokens
    starts = [batches.starts(step) for step in range(20)]
    assert max(each.max() for each in starts) < 200
    assert len(data.windows(some)) == len(data.windows(whole))
    with pytest.raises(
        WakefulError, match=r"data\.max_tokens = .* is more than the .* training tokens: lower it"
    ):
        data.batches(tiny(text, data={"max_tokens": 10**9}))


@pytest.mark.parametrize("given", [{}, {"max_tokens": 1500}])
def test_a_run_begins_with_a_later_batch_where_asked(
    given: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    text = write_text(tmp_path / "text")
    plain, later = tiny(text, data=given), tiny(text, data={"first_batch": 3, **given})
    data = load_data(plain.data)
    whole, rest = (data.batches(each) for each in (plain, later))
    assert not torch.equal(whole.batch(0), whole.batch(3))
    for step in range(3):
        assert torch.equal(rest.batch(step), whole.batch(3 + step))


@pytest.mark.slow
def test_windows_of_text_begin_with_bos_where_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    text = write_text(tmp_path / "text")
    plain, begun = tiny(text), tiny(text, data={"bos": True})
    data = load_data(plain.data)
    rows, with_bos = (data.batches(each).batch(3) for each in (plain, begun))
    assert (with_bos[:, 0] == data.tokenizer.end_of_text).all()
    assert torch.equal(with_bos[:, 1:], rows[:, 1:])  # the same targets
    for one, other in zip(data.windows(plain), data.windows(begun), strict=True):
        assert (other[0][:, 0] == data.tokenizer.end_of_text).all()
        assert torch.equal(other[0][:, 1:], one[0][:, 1:])
        assert torch.equal(other[1], one[1])
    run = train_run(begun, tmp_path / "run")
    model = load(run.path)
    assert model.start_tokens("auto") == [data.tokenizer.end_of_text]
    assert model.encode("def ") == [data.tokenizer.end_of_text, *data.tokenizer.encode("def ")]
    assert load(train_run(plain, tmp_path / "plain").path).start_tokens("auto") == []
    losses = [row["loss"] for row in run.metrics() if row["kind"] == "train"]
    (run.checkpoints / "step-00000008").rename(tmp_path / "last")
    again = train_run(Config(), run.path, resume=True)
    assert losses == [row["loss"] for row in again.metrics() if row["kind"] == "train"]
