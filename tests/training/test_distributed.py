"""Runs of several processes: what one process computes, and how they end together."""

import shutil
from pathlib import Path

import pytest
import torch

from training import processes
from training.shares import CASES, SUMS, alone, assert_alike, config_of, job, together
from training.test_loop import losses, stop_after, weights
from wakeful.config.schema import Config
from wakeful.config.tables import TomlTable
from wakeful.data.order import Batches
from wakeful.data.preparing import load_data
from wakeful.loading.load import read_decoder
from wakeful.runs.run import Run
from wakeful.training.loop import train_run

REPLICAS = ("own", "resformer", "neutreno")
"""The cases that the fast tests train on replicas too."""
HALF: TomlTable = {"train": {
    "dtype": "bfloat16", "diagnose": {"every": 4, "num_sequences": 2, "heads": True}
}}  # fmt: skip


@pytest.fixture(scope="module")
def two(folder: Path) -> Path:
    """Train everything that takes two processes, in two processes."""
    out = folder / "two"
    own = config_of(folder, CASES["own"])
    haar = config_of(folder, CASES["haar"])
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(RuntimeError, match="stop"):
            train_run(haar, out / "one-then-two")
    jobs = [job(out / f"{name}-fsdp", config_of(folder, over)) for name, over in CASES.items()]
    jobs += [job(out / f"{name}-ddp", config_of(folder, CASES[name], "ddp")) for name in REPLICAS]
    jobs += [
        job(out / "muon-fsdp", config_of(folder, {"optimizer": {"name": "muon"}})),
        job(out / "half-fsdp", config_of(folder, HALF)),
        job(out / "cut", own, stop=5),
        job(out / "two-then-one", haar, stop=5),
        job(out / "replicas-cut", config_of(folder, CASES["own"], "ddp"), stop=5),
        job(out / "odd", config_of(folder, {"train": {"batch_size": 5}})),
        job(out / "eigenbasis", config_of(folder, {"optimizer": {"name": "orthoadam",
                                                                "rotation": "eigenbasis"}})),
        job(out / "nan", own, nan=(5, 1)),
    ]  # fmt: skip
    jobs += [job(out / name) for name in ("cut", "replicas-cut", "one-then-two")]
    together(folder, 2, jobs)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parallel"),
    [(name, "fsdp") for name in CASES] + [(name, "ddp") for name in REPLICAS],
)
def test_two_processes_compute_what_one_does(
    folder: Path, two: Path, name: str, parallel: str
) -> None:
    run, single_process = Run.open(two / f"{name}-{parallel}"), alone(folder, name)
    assert run.header.status == "done"
    dtype = single_process.config.train.dtype
    assert_alike(run, single_process, SUMS[dtype])
    mine, expected = weights(run), weights(single_process)
    assert mine.keys() == expected.keys()
    if dtype == "float64":  # Adam makes nothing of a gradient of nothing, so float32 cannot tell.
        for key, tensor in expected.items():
            torch.testing.assert_close(mine[key], tensor, rtol=0, atol=1e-10)
    for file in ("summary.json", "validation.parquet", "metrics.parquet"):
        assert (run.path / file).is_file()
    assert run.read_json("environment.json")["processes"] == 2
    here, there = run.read_json("summary.json"), single_process.read_json("summary.json")
    for key in ("parameters", "bytes", "tokens", "data"):
        assert here[key] == there[key], key
    assert here["validation"]["num_windows"] == there["validation"]["num_windows"]


@pytest.mark.slow
def test_muon_on_shares_is_muon_to_the_rounding_of_bfloat16(folder: Path, two: Path) -> None:
    expected = train_run(
        config_of(folder, {"optimizer": {"name": "muon"}}), folder / "one" / "muon"
    )
    # Its Newton–Schulz iteration works in bfloat16, and sums over processes in another order.
    assert losses(Run.open(two / "muon-fsdp")) == pytest.approx(losses(expected), rel=2e-4)


@pytest.mark.slow
def test_mixed_precision_on_shares_learns_what_autocast_does(folder: Path, two: Path) -> None:
    single = train_run(config_of(folder, HALF), folder / "one" / "half")
    run = Run.open(two / "half-fsdp")
    mine, expected = (
        summary_run.read_json("summary.json")["diagnosis"] for summary_run in (run, single)
    )
    assert mine == pytest.approx(expected, rel=0.05)
    assert losses(run) == pytest.approx(losses(single), rel=2e-3)  # bfloat16 has 8 bits
    assert {tensor.dtype for tensor in weights(run).values()} == {torch.float32}


@pytest.mark.slow
def test_a_checkpoint_holds_the_shares_of_all(folder: Path, two: Path) -> None:
    run = Run.open(two / "own-fsdp")
    for step in (6, 8):
        mine, expected = (
            read_decoder(path, step=step, dtype="auto").decoder().state_dict()
            for path in (run.path, alone(folder, "own").path)
        )
        for name, tensor in expected.items():
            torch.testing.assert_close(mine[name], tensor, rtol=0, atol=2e-3)


def test_a_resumed_run_of_as_many_processes_is_the_same_to_the_bit(two: Path) -> None:
    for cut, uncut in (("cut", "own-fsdp"), ("replicas-cut", "own-ddp")):
        mine, expected = Run.open(two / cut), Run.open(two / uncut)
        assert losses(mine) == losses(expected)
        for name, tensor in weights(expected).items():
            assert torch.equal(weights(mine)[name], tensor), name
        ends = [run.read_json("summary.json") for run in (mine, expected)]
        assert ends[0]["validation"] == ends[1]["validation"]


@pytest.mark.slow
def test_a_run_goes_on_with_another_number_of_processes(folder: Path, two: Path) -> None:
    expected = alone(folder, "haar")
    fewer = two / "two-then-one"
    assert Run.open(fewer).header.status == "stopped"
    assert_alike(train_run(Config(), fewer, resume=True), expected, SUMS["float32"])
    assert_alike(Run.open(two / "one-then-two"), expected, SUMS["float32"])


def test_what_cannot_be_shared_out_is_refused_and_leaves_nothing(two: Path) -> None:
    for name, message in (
        ("odd", "train.batch_size = 5 cannot be shared evenly by 2 processes; use 4 or 6"),
        ("eigenbasis", "optimizer.rotation = 'eigenbasis' learns from whole gradients"),
    ):
        assert message in (two / f"{name}.error").read_text()
        assert not (two / name).exists()


@pytest.mark.slow
def test_a_batch_that_is_no_number_on_one_process_stops_all(folder: Path, two: Path) -> None:
    run = Run.open(two / "nan")
    error = (two / "nan.error").read_text()
    assert "the loss is nan at step 5" in error
    assert "the checkpoint of step 3 is kept" in error
    config = run.config
    batches = Batches(load_data(config.data).train, length=16, batch_size=4, seed=config.train.seed)
    assert ", ".join(str(start) for start in batches.starts(4)) in error
    assert run.header.status == "stopped"
    assert [row["step"] for row in run.metrics() if row["kind"] == "train"] == [1, 2, 3, 4]
    resumed = train_run(Config(), run.path, resume=True)
    assert losses(resumed) == pytest.approx(losses(alone(folder, "own")), rel=1e-6)


@pytest.mark.slow
def test_a_run_that_another_process_works_in_is_refused_once(two: Path, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(two / "own-fsdp", tmp_path / "run")))
    before = sorted(file.name for file in run.path.iterdir())
    with run.lock():
        status, _, errors = processes.ended(processes.start(2, "train", "--resume", str(run.path)))
    assert status == 1
    (line,) = processes.error_lines(errors)
    assert "another process is working in" in line
    assert sorted(file.name for file in run.path.iterdir()) == sorted({*before, ".lock"})
    assert run.header.status == "done"
