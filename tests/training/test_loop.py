"""The loop: what it computes, and what it leaves in the run directory."""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import torch
from safetensors.torch import load_file

from training.runs import tiny
from wakeful.config.schema import Config, config_from_table, config_to_toml
from wakeful.data.order import Batches, ValidationWindows
from wakeful.data.preparing import load_data, prepare
from wakeful.device import choose_device
from wakeful.errors import WakefulError
from wakeful.hf.weights_out import export_decoder
from wakeful.loading.load import read_decoder
from wakeful.model.decoder import Decoder
from wakeful.optim.muon import MuonAdamW
from wakeful.runs import checkpoint
from wakeful.runs.distributed import World
from wakeful.runs.run import Run
from wakeful.terminal.display import Display
from wakeful.training.finishing import forget_peak
from wakeful.training.loop import train_run
from wakeful.training.rows import train_variants
from wakeful.training.setup import autocast, make_decoder, make_optimizer, resolve_config
from wakeful.training.validation import mean_loss, window_losses


@contextlib.contextmanager
def silent(_: str) -> Iterator[Display]:
    yield Display()


def losses(run: Run) -> list[float]:
    return [row["loss"] for row in run.metrics() if row["kind"] == "train"]


def weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(checkpoint.newest_checkpoint(run.checkpoints) / "model.safetensors")


def test_a_run_directory_describes_itself(text: Path, tmp_path: Path) -> None:
    config = tiny(text)
    run = train_run(config, tmp_path / "run")
    assert run.header.status == "done"
    written = config_from_table(tomllib.loads((run.path / "config.toml").read_text()))
    assert written == resolve_config(config, load_data(config.data))
    metrics = pl.read_parquet(run.path / "metrics.parquet")
    trained = metrics.filter(pl.col("kind") == "train")
    assert trained["step"].to_list() == list(range(1, 9))
    assert trained["tokens"].to_list() == [64 * n for n in range(1, 9)]
    evaluations = metrics.filter(pl.col("kind") == "validation")
    assert evaluations["step"].to_list() == [3, 6, 8]
    summary = json.loads((run.path / "summary.json").read_text())
    windows = pl.read_parquet(run.path / "validation.parquet")
    data = load_data(config.data)
    # Every token of the validation set but the first is predicted once.
    assert windows["tokens"].sum() == data.validation.num_tokens - 1
    assert summary["validation"]["loss"] == pytest.approx(mean_loss(windows)[0])
    assert summary["validation"]["perplexity"] == pytest.approx(math.exp(mean_loss(windows)[0]))
    assert checkpoint.steps(run.checkpoints) == [6, 8]
    environment = json.loads((run.path / "environment.json").read_text())
    assert environment["torch"] == torch.__version__


@pytest.mark.slow
def test_training_learns_and_restores_what_it_learned(text: Path, tmp_path: Path) -> None:
    config = tiny(text, train={"steps": 60, "eval_every": 0, "checkpoint_every": 0})
    run = train_run(config, tmp_path / "run")
    curve = losses(run)
    assert curve[-1] < curve[0] - 1.0
    trained = read_decoder(run.path, dtype="auto")
    data = load_data(config.data)
    windows = ValidationWindows(data.validation, length=16, batch_size=16)
    frame = window_losses(trained.decoder(), windows, autocast(config.train, torch.device("cpu")))
    stored = pl.read_parquet(run.path / "validation.parquet")
    assert frame["loss"].to_list() == pytest.approx(stored["loss"].to_list(), rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
def test_accumulated_gradients_are_those_of_the_whole_batch(
    text: Path, tmp_path: Path, dtype: str, tolerance: float
) -> None:
    settings = {"dtype": dtype, "steps": 4, "eval_every": 0}
    uninterrupted = train_run(tiny(text, train=settings), tmp_path / "whole")
    for micro in (1, 2):
        parts = train_run(
            tiny(text, train=settings | {"micro_batch_size": micro}), tmp_path / f"parts{micro}"
        )
        assert losses(parts) == pytest.approx(losses(uninterrupted), rel=tolerance)
        norms = [[row["grad_norm"] for row in run.metrics()[:4]] for run in (parts, uninterrupted)]
        assert norms[0] == pytest.approx(norms[1], rel=10 * tolerance)


@pytest.mark.slow
def test_recomputing_activations_changes_nothing(text: Path, tmp_path: Path) -> None:
    model = {"route": 'resformer(mode="learnable")', "depth": "denseformer"}
    run = train_run(tiny(text, model=model), tmp_path / "kept")
    again = {"checkpoint_activations": True}
    recomputed = train_run(tiny(text, model=model, train=again), tmp_path / "recomputed")
    assert losses(recomputed) == losses(run)
    for name, tensor in weights(run).items():
        assert torch.equal(weights(recomputed)[name], tensor), name


@pytest.mark.slow
def test_mixed_precision_stays_near_full_precision(text: Path, tmp_path: Path) -> None:
    full = train_run(tiny(text), tmp_path / "full")
    mixed = train_run(tiny(text, train={"dtype": "bfloat16"}), tmp_path / "mixed")
    assert losses(mixed) != losses(full)
    # bfloat16 keeps 8 bits: half a percent of a loss of about 5.6.
    assert losses(mixed) == pytest.approx(losses(full), abs=0.03)
    assert all(tensor.dtype == torch.float32 for tensor in weights(mixed).values())


def test_the_learning_rate_warms_up_and_falls_to_its_floor(text: Path, tmp_path: Path) -> None:
    run = train_run(tiny(text), tmp_path / "run")
    rates = [row["lr"] for row in run.metrics() if row["kind"] == "train"]
    assert rates[0] == pytest.approx(1e-7)
    assert rates[2] == pytest.approx(3e-3)
    assert rates[-1] == pytest.approx(3e-4)
    assert rates[2:] == sorted(rates[2:], reverse=True)


def test_clipping_bounds_the_step(text: Path, tmp_path: Path) -> None:
    # Plain gradient descent with a clipped gradient moves the weights by at most lr · clip.
    optimizer = {"name": "torch.optim:SGD", "clip": 1e-3, "lr": 1.0, "final_lr": 1.0,
                 "initial_lr": 1.0, "warmup_steps": 0, "weight_decay": 0.0}  # fmt: skip
    config = tiny(text, optimizer=optimizer, train={"steps": 1, "dtype": "float64"})
    run = train_run(config, tmp_path / "run")
    start = make_decoder(resolve_config(config, load_data(config.data)), torch.device("cpu"))
    moved = sum(
        float((weights(run)[name] - tensor).square().sum())
        for name, tensor in start.state_dict().items()
    )
    assert math.sqrt(moved) == pytest.approx(1e-3, rel=1e-5)
    assert run.metrics()[0]["grad_norm"] > 1e-3


@pytest.mark.slow
def test_twins_share_weights_and_data(text: Path, tmp_path: Path) -> None:
    vanilla = tiny(text)
    cured = tiny(text, model={"route": "svformer", "normalizer": "softmax1(learned=True)"})
    data = load_data(vanilla.data)
    state = make_decoder(resolve_config(vanilla, data), torch.device("cpu")).state_dict()
    two = make_decoder(resolve_config(cured, data), torch.device("cpu")).state_dict()
    assert set(state) - set(two) == {"blocks.1.attention.value.weight"}
    for name in set(state) & set(two):
        assert torch.equal(state[name], two[name]), name
    # softmax-1 with a sink of e^−1e9 is softmax: the same run, had the data not been the same.
    plain = train_run(vanilla, tmp_path / "plain")
    closed = {"normalizer": "softmax1(learned=True, start=-1e9)"}
    neutral = train_run(tiny(text, model=closed), tmp_path / "neutral")
    assert losses(neutral) == pytest.approx(losses(plain), rel=1e-5)


def test_processes_wait_for_each_other_s_own_work_however_long_it_takes(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def recorded(name: str) -> None:
        real = getattr(World, name)
        monkeypatch.setattr(World, name, lambda *args: calls.append(name) or real(*args))

    for name in ("leader_first", "meet", "gather", "sum"):
        recorded(name)
    train_run(tiny(text, train={"steps": 1}), tmp_path / "run")
    # Collectives give up after ten minutes, the store does not: it comes before each of them.
    assert calls[:3] == ["leader_first", "meet", "gather"]  # after a machine has prepared the text
    assert calls[-2:] == ["meet", "sum"]  # after the first process has measured the end


FACTORED = """
from torch.optim import Adafactor


class Mine(Adafactor):
    def __init__(self, groups, *, lr: float, depth: int) -> None:
        super().__init__(groups, lr=lr, d=depth)
"""


@pytest.mark.slow
def test_an_optimizer_of_ones_own_trains_and_resumes_to_the_bit(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "factored.py").write_text(FACTORED)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = "factored:Mine(depth=2)"
    test_every_optimizer_trains_and_resumes_to_the_bit(text, tmp_path, name, monkeypatch)
    monkeypatch.delitem(sys.modules, "factored")
    with pytest.raises(WakefulError, match="import factored first"):
        train_run(Config(), tmp_path / "cut", resume=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    ["adamw", "orthoadam", "muon(adamw_lr=2e-4)"],
)
def test_every_optimizer_trains_and_resumes_to_the_bit(
    text: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(text, optimizer={"name": name}, train={"steps": 5, "checkpoint_every": 2})
    uninterrupted = train_run(config, tmp_path / "whole")
    stop_after(monkeypatch, 4)
    with pytest.raises(RuntimeError, match="stop"):
        train_run(config, tmp_path / "cut")
    monkeypatch.undo()
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    resumed = train_run(Config(), tmp_path / "cut", resume=True)
    assert losses(resumed) == losses(uninterrupted)
    for key, tensor in weights(uninterrupted).items():
        assert torch.equal(weights(resumed)[key], tensor), key


def stop_after(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Make the loop fail when it comes to the step after `steps`."""
    real = Batches.batch

    def batch(self: Batches, step: int) -> torch.Tensor:
        if step == steps:
            raise RuntimeError("stop")
        return real(self, step)

    monkeypatch.setattr(Batches, "batch", batch)


def test_the_optimizer_gives_no_decay_to_vectors(text: Path) -> None:
    config = tiny(text, model={"norm": "layernorm", "bias": True})
    decoder = make_decoder(resolve_config(config, load_data(config.data)), torch.device("cpu"))
    optimizer = make_optimizer(config, decoder)
    decayed = {p for g in optimizer.param_groups if g["weight_decay"] for p in g["params"]}
    for name, parameter in decoder.named_parameters():
        assert (parameter in decayed) == (parameter.ndim > 1), name


ASKED = {"lr": 2e-3, "beta1": 0.7, "beta2": 0.83, "eps": 3e-7, "weight_decay": 0.13,
         "rotation": "block_diagonal(size=4)"}  # fmt: skip


def optimizer_asked(name: str) -> torch.optim.Optimizer:
    config = tiny(Path("text"), optimizer={**ASKED, "name": name}, train={"seed": 11})
    return make_optimizer(config, Decoder(config.model))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("adamw", {"betas": (0.7, 0.83), "eps": 3e-7}),
        ("orthoadam", {"betas": (0.7, 0.83), "eps": 3e-7}),
        ("muon", {"betas": (0.7, 0.83), "eps": 3e-7}),
    ],
)
def test_the_optimizer_has_what_the_configuration_says(name: str, expected: dict) -> None:
    groups = optimizer_asked(name).param_groups
    assert {group["lr"] for group in groups} == {2e-3}
    assert {group["weight_decay"] for group in groups} == {0.13, 0.0}
    # Muon's own groups, those of the hidden matrices, have no moments of Adam's.
    groups = [group for group in groups if name != "muon" or "betas" in group]
    assert groups
    for group in groups:
        assert {key: group[key] for key in expected} == expected


def test_orthoadams_rotations_are_of_the_kind_asked_for_and_the_runs_seed() -> None:
    groups = optimizer_asked("orthoadam").param_groups
    actual = [rotation for group in groups for entry in group["rotations"] for rotation in entry]
    assert {(rotation["kind"], rotation["seed"]) for rotation in actual} == {
        ("block_diagonal(size=4)", 11)
    }


def test_muons_rate_for_embeddings_and_head_is_kept_at_every_step(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rates: list[tuple[list[float], list[float]]] = []
    real = MuonAdamW.step

    def step(self: MuonAdamW) -> None:
        matrices, rest = (
            sorted({group["lr"] for group in self.param_groups if ("betas" in group) is adams})
            for adams in (False, True)
        )
        rates.append((matrices, rest))
        real(self)

    monkeypatch.setattr(MuonAdamW, "step", step)
    optimizer = {"name": "muon(adamw_lr=2e-4)", "initial_lr": 1e-3, "lr": 1e-2, "final_lr": 4e-3,
                 "warmup_steps": 1}  # fmt: skip
    train_run(tiny(text, optimizer=optimizer, train={"steps": 3}), tmp_path / "run")
    assert [pytest.approx([rate]) for rate in (1e-3, 1e-2, 4e-3)] == [
        group_rate for group_rate, _ in rates
    ]
    assert [pytest.approx([rate]) for rate in (2e-5, 2e-4, 8e-5)] == [
        group_rate for _, group_rate in rates
    ]


@pytest.mark.slow
def test_tensorboard_has_what_the_metrics_have(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    on = {"tensorboard": True, "steps": 5, "checkpoint_every": 2, "eval_every": 3}
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(RuntimeError, match="stop"):
            train_run(tiny(text, train=on), tmp_path / "run")
    run = train_run(Config(), tmp_path / "run", resume=True)
    events = accumulator.EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    for kind, figure in (("train", "loss"), ("train", "lr"), ("validation", "loss")):
        rows = [row for row in run.metrics() if row["kind"] == kind]
        actual = events.Scalars(f"{kind}/{figure}")
        # Step 3 was reached twice and is there once.
        assert [event.step for event in actual] == [row["step"] for row in rows]
        assert [event.value for event in actual] == pytest.approx([row[figure] for row in rows])


def test_without_tensorboard_nothing_is_begun(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(WakefulError, match=r"needs the package tensorboard: pip install"):
        train_run(tiny(text, train={"tensorboard": True}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_resumed_run_seeks_its_data(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = train_run(tiny(text), tmp_path / "run")
    shutil.rmtree(run.checkpoints / "step-00000008")
    steps: list[int] = []
    real = Batches.batch

    def batch(self: Batches, step: int) -> torch.Tensor:
        steps.append(step)
        return real(self, step)

    monkeypatch.setattr(Batches, "batch", batch)
    train_run(Config(), run.path, resume=True)
    assert steps == [6, 7]


@pytest.mark.slow
def test_the_seed_sets_the_weights_and_the_data_order(text: Path, tmp_path: Path) -> None:
    short = {"steps": 2, "eval_every": 0}
    first, same, second = (
        train_run(tiny(text, train=short | {"seed": seed}), tmp_path / name)
        for name, seed in (("one", 1), ("same", 1), ("other", 2))
    )
    assert losses(first) == losses(same)
    assert all(torch.equal(weights(same)[name], w) for name, w in weights(first).items())
    assert losses(first) != losses(second)


def test_no_clipping_means_none(text: Path, tmp_path: Path) -> None:
    optimizer = {"name": "torch.optim:SGD", "clip": 0.0, "lr": 1.0, "final_lr": 1.0,
                 "initial_lr": 1.0, "warmup_steps": 0, "weight_decay": 0.0}  # fmt: skip
    config = tiny(text, optimizer=optimizer, train={"steps": 1, "dtype": "float64"})
    run = train_run(config, tmp_path / "run")
    start = make_decoder(resolve_config(config, load_data(config.data)), torch.device("cpu"))
    moved = sum(
        float((weights(run)[name] - tensor).square().sum())
        for name, tensor in start.state_dict().items()
    )
    # A step of plain descent at a rate of one is the gradient.
    assert math.sqrt(moved) == pytest.approx(run.metrics()[0]["grad_norm"], rel=1e-6)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tpu", "is not a device"),
        ("meta", "is not supported"),
        ("mps", "float64, which Apple's GPUs lack; use cpu"),
        ("cuda:99", r"no CUDA device|CUDA devices here"),
    ],
)
def test_devices_that_are_not_there_are_refused(name: str, message: str) -> None:
    for field in ("device", "train.device"):
        with pytest.raises(WakefulError, match=f"^{field} = '{name}'.*({message})"):
            choose_device(name, field=field)


@pytest.mark.parametrize("width", [10**12, 10**30])
def test_a_model_past_all_memory_is_refused(text: Path, tmp_path: Path, width: int) -> None:
    def begin(positions: str) -> None:
        model = {"width": width, "mlp_width": 4, "positions": positions}
        train_run(tiny(text, model=model), tmp_path / "run")

    for positions in ("rotary", "none"):  # a table of positions is refused before the weights are
        with pytest.raises(WakefulError, match="does not fit into memory"):
            begin(positions)
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_a_compiled_run_computes_the_same(text: Path, tmp_path: Path) -> None:
    # In processes of their own: the shape checks of these tests cannot be compiled.
    actual = []
    for compiled in ("no_compile", "compile"):
        file = tmp_path / "config.toml"
        file.write_text(config_to_toml(tiny(text)))
        out = tmp_path / compiled
        command = ["train", str(file), "--out", str(out), f"--train.{compiled}"]
        subprocess.run([sys.executable, "-m", "wakeful", *command], check=True)
        actual.append(losses(Run.open(out)))
    assert actual[0] == pytest.approx(actual[1], rel=1e-5)


class Noting(Display):
    """Stores the calls that it gets."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_a_warmup_past_the_end_is_clipped_with_a_note(text: Path, tmp_path: Path) -> None:
    show = Noting()
    config = tiny(text, train={"steps": 3}, optimizer={"warmup_steps": 20})
    run = train_run(config, tmp_path / "run", show=show)
    (note,) = show.notes
    assert "optimizer.warmup_steps = 20 is longer than the run" in note
    assert run.config.optimizer.warmup_steps == 3
    rates = [row["lr"] for row in run.metrics() if row["kind"] == "train"]
    assert rates == pytest.approx([1e-7, 1e-3, 2e-3], rel=1e-3)


@pytest.mark.slow
def test_the_peak_of_memory_is_that_of_one_run(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: list[str] = []
    monkeypatch.setattr(
        torch.cuda, "reset_peak_memory_stats", lambda device: options.append(str(device))
    )
    forget_peak(torch.device("cuda:1"))
    forget_peak(torch.device("cpu"))
    assert options == ["cuda:1"]
    devices: list[torch.device] = []
    monkeypatch.setattr("wakeful.training.loop.forget_peak", devices.append)
    train_variants({"a": tiny(text), "b": tiny(text)}, tmp_path / "c", seeds=[0], display=silent)
    assert len(devices) == 2


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_files_have_the_permissions_of_the_umask(text: Path, tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        run = train_run(tiny(text, train={"steps": 1}), tmp_path / "run")
        trained = read_decoder(run.path)
        export_decoder(trained.decoder(), tmp_path / "export", tokenizer=trained.wakeful_tokenizer)
    finally:
        os.umask(before)
    places = [*run.path.rglob("*"), *(tmp_path / "export").rglob("*")]
    assert {path.suffix for path in places} >= {".safetensors", ".parquet", ".json", ".toml"}
    for path in places:
        full = 0o777 if path.is_dir() else 0o666
        assert path.stat().st_mode & 0o777 == full & ~mask, path


class Session:
    """A stand-in for a run of Weights & Biases."""

    class Error(Exception):
        """The error of the package."""

    def __init__(self) -> None:
        self.begun: list[dict[str, Any]] = []
        self.logged: list[tuple[int, dict[str, float]]] = []
        self.ended: list[int] = []

    def init(self, **options: Any) -> "Session":
        self.begun.append(options)
        return self

    def log(self, row: dict[str, float], *, step: int) -> None:
        self.logged.append((step, row))

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


@pytest.mark.slow
def test_weights_and_biases_gets_what_the_metrics_have(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = Session()
    monkeypatch.setitem(sys.modules, "wandb", session)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    on = {"wandb": True, "steps": 5, "checkpoint_every": 2, "eval_every": 3}
    with monkeypatch.context() as patch:
        stop_after(patch, 3)
        with pytest.raises(RuntimeError, match="stop"):
            train_run(tiny(text, train=on), tmp_path / "run")
    run = train_run(Config(), tmp_path / "run", resume=True)
    assert len(session.ended) == 2
    first, second = session.begun
    assert first == second  # the same id, or name: it goes on in the same place
    assert (first["project"], first["resume"]) == ("wakeful", "allow")
    assert first["config"]["train"]["steps"] == 5
    losses_of = {step: row["train/loss"] for step, row in session.logged if "train/loss" in row}
    assert losses_of == {r["step"]: r["loss"] for r in run.metrics() if r["kind"] == "train"}
    assert {step for step, row in session.logged if "validation/loss" in row} == {3, 5}
    assert (first["name"], first["dir"], session.ended) == ("vanilla", str(run.path), [1, 0])


def test_weights_and_biases_offline(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = train_run(tiny(text, train={"wandb": True, "steps": 2}), tmp_path / "run")
    (folder,) = (run.path / "wandb").glob("offline-run-*")
    assert list(folder.glob("run-*.wandb"))


def test_weights_and_biases_without_a_login(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class LoggedOut(Session):
        def init(self, **_: Any) -> "Session":
            raise self.Error("No API key configured.")

    monkeypatch.setitem(sys.modules, "wandb", LoggedOut())
    with pytest.raises(WakefulError, match=r"No API key configured.*wandb login, or set WANDB_"):
        train_run(tiny(text, train={"wandb": True}), tmp_path / "run")


def test_without_the_package_nothing_is_begun(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(WakefulError, match="needs the package wandb: pip install"):
        train_run(tiny(text, train={"wandb": True}), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_prepared_data_is_not_asked_for_what_it_was_not_prepared_with(
    text: Path, tmp_path: Path
) -> None:
    prepare(str(text), tmp_path / "plain", vocab_size=280, validation_fraction=0.2)
    for data, field in (
        ({"validation_source": str(text)}, "data.validation_source"),
        ({"max_bytes": 500}, "data.max_bytes = 500"),
        ({"keep_overlap": True}, "data.keep_overlap"),
        ({"tokenizer": str(tmp_path / "plain")}, "data.tokenizer"),
    ):
        with pytest.raises(WakefulError, match=field):
            train_run(tiny(tmp_path / "plain", data=data), tmp_path / "run")
        assert not (tmp_path / "run").exists()
