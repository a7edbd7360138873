"""Runs of several processes: what one process computes, and how they end together."""

import hashlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from train import processes
from train.runs import tiny, write_text
from train.test_loop import losses, stop_after, weights
from wakeful.cli import main
from wakeful.config import Config, config_to_table, config_to_toml
from wakeful.data.order import Batches
from wakeful.distributed import World, started_as
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.run import Run
from wakeful.tables import Table
from wakeful.train import checkpoint
from wakeful.train.loop import Initial, train
from wakeful.train.parallel import check_shares
from wakeful.train.restore import restore
from wakeful.train.setup import load_data
from wakeful.variants import variants

CASES: dict[str, Table] = {
    "own": {"train": {"diagnose": {"every": 4, "num_sequences": 3}, "eval_batch_size": 7}},
    "resformer": {"model": {"route": 'resformer(mode="learnable")', "tied": True}},
    "svformer": {"model": {"route": "svformer", "normalizer": "softmax1(learned=True)"}},
    "neutreno": {"model": {"route": "neutreno", "tied": True, "num_kv_heads": 1},
                 "train": {"checkpoint_activations": True, "micro_batch_size": 1}},
    "denseformer": {"model": {"route": "dense", "depth": "denseformer", "num_layers": 3},
                    "train": {"micro_batch_size": 1, "dtype": "float64"}},
    "hadamard": {"optimizer": {"name": "orthoadam"}},
    "haar": {"optimizer": {"name": "orthoadam", "rotation": "haar"}},
}  # fmt: skip
"""Configurations that are trained on one process, on shares and on replicas."""
FIELDS = {"routes": "route", "depth": "depth", "normalizers": "normalizer"}
REPLICAS = ("own", "resformer", "neutreno")
"""Those of them that the fast tests train on replicas too."""
SUMS = {"float32": 1e-6, "float64": 1e-12}
"""How far sums in another order may be: relative, for losses and gradient norms."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a folder with text and a cache of its own, shared by the runs of this file."""
    here = tmp_path_factory.mktemp("processes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WAKEFUL_CACHE", str(here / "cache"))
        write_text(here / "text")
        yield here


def config_of(folder: Path, over: Table, parallel: str = "fsdp") -> Config:
    over = {**over, "train": {**over.get("train", {}), "parallel": parallel}}
    return tiny(folder / "text", **over)


def job(
    out: Path,
    config: Config | None = None,
    *,
    stop: int = 0,
    nan: tuple[int, int] | None = None,
    initial: Path | None = None,
) -> Table:
    """Return an entry of a job file; without a configuration it resumes."""
    return {
        "out": str(out),
        "config": config and config_to_table(config),
        "resume": not config,
        "stop": stop,
        "nan": nan,
        "initial": initial and str(initial),
    }


def together(folder: Path, number: int, jobs: list[Table]) -> None:
    """Do jobs, one after the other, in `number` processes."""
    file = folder / f"jobs-{number}.json"
    file.write_text(json.dumps(jobs))
    status, _, errors = processes.ended(
        processes.start(number, str(file), module="train.processes")
    )
    assert status == 0, errors


def alone(folder: Path, name: str) -> Run:
    """Return the run of a case in one process."""
    path = folder / "one" / name
    return Run.open(path) if path.exists() else train(config_of(folder, CASES[name]), path)


@pytest.fixture(scope="module")
def two(folder: Path) -> Path:
    """Train everything that takes two processes, in two processes."""
    out = folder / "two"
    own = config_of(folder, CASES["own"])
    haar = config_of(folder, CASES["haar"])
    with pytest.MonkeyPatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(RuntimeError, match="stop"):
            train(haar, out / "one-then-two")
    jobs = [job(out / f"{name}-fsdp", config_of(folder, over)) for name, over in CASES.items()]
    jobs += [job(out / f"{name}-ddp", config_of(folder, CASES[name], "ddp")) for name in REPLICAS]
    jobs += [
        job(out / "muon-fsdp", config_of(folder, {"optimizer": {"name": "muon"}})),
        job(out / "half-fsdp", config_of(folder, {"train": {"dtype": "bfloat16"}})),
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


def assert_alike(run: Run, one: Run, tolerance: float) -> None:
    """Check that all figures of a run are those of another to a relative tolerance."""
    mine, theirs = run.metrics(), one.metrics()
    assert [(row["kind"], row["step"]) for row in mine] == [
        (row["kind"], row["step"]) for row in theirs
    ]
    for here, there in zip(mine, theirs, strict=True):
        keys = here.keys() - {"seconds", "tokens_per_second", "standard_error"}
        assert keys == there.keys() - {"seconds", "tokens_per_second", "standard_error"}
        for key in keys - {"kind"}:
            assert here[key] == pytest.approx(there[key], rel=tolerance), (here["step"], key)


@pytest.mark.parametrize(
    ("name", "parallel"),
    [(name, "fsdp") for name in CASES] + [(name, "ddp") for name in REPLICAS],
)
def test_two_processes_compute_what_one_does(
    folder: Path, two: Path, name: str, parallel: str
) -> None:
    run, one = Run.open(two / f"{name}-{parallel}"), alone(folder, name)
    assert run.header["status"] == "done"
    dtype = one.config.train.dtype
    assert_alike(run, one, SUMS[dtype])
    mine, theirs = weights(run), weights(one)
    assert mine.keys() == theirs.keys()
    if dtype == "float64":  # Adam makes nothing of a gradient of nothing, so float32 cannot tell.
        for key, tensor in theirs.items():
            torch.testing.assert_close(mine[key], tensor, rtol=0, atol=1e-10)
    for file in ("summary.json", "validation.parquet", "metrics.parquet"):
        assert (run.path / file).is_file()
    assert run.read_json("environment.json")["processes"] == 2
    here, there = run.read_json("summary.json"), one.read_json("summary.json")
    for key in ("parameters", "bytes", "tokens", "data"):
        assert here[key] == there[key], key
    assert here["validation"]["num_windows"] == there["validation"]["num_windows"]


def test_muon_on_shares_is_muon_to_the_rounding_of_bfloat16(folder: Path, two: Path) -> None:
    one = train(config_of(folder, {"optimizer": {"name": "muon"}}), folder / "one" / "muon")
    # Its Newton–Schulz iteration works in bfloat16, and sums over processes in another order.
    assert losses(Run.open(two / "muon-fsdp")) == pytest.approx(losses(one), rel=2e-4)


def test_mixed_precision_on_shares_learns_what_autocast_does(folder: Path, two: Path) -> None:
    one = train(config_of(folder, {"train": {"dtype": "bfloat16"}}), folder / "one" / "half")
    run = Run.open(two / "half-fsdp")
    assert losses(run) == pytest.approx(losses(one), rel=2e-3)  # bfloat16 has 8 bits
    assert {tensor.dtype for tensor in weights(run).values()} == {torch.float32}


def test_a_checkpoint_in_shares_is_read_as_a_whole_one(folder: Path, two: Path) -> None:
    run = Run.open(two / "own-fsdp")
    middle, last = (run.checkpoints / f"step-0000000{step}" for step in (6, 8))
    shares = [f"{what}-0000{rank}-of-00002.safetensors"
              for what in ("model", "optimizer") for rank in (0, 1)]  # fmt: skip
    assert sorted(f.name for f in middle.iterdir()) == ["manifest.json", *shares, "state.json"]
    assert (last / "model.safetensors").is_file()
    sizes = [(middle / name).stat().st_size for name in shares]
    assert max(sizes[2:]) < 0.6 * sum(sizes[2:])  # each wrote about half
    one = restore(alone(folder, "own").path, step=6).decoder.state_dict()
    mine = restore(run.path, step=6).decoder.state_dict()
    for name, tensor in one.items():
        torch.testing.assert_close(mine[name], tensor, rtol=0, atol=2e-3)
    assert main(["generate", str(run.path), "--num-tokens", "2", "--prompt", "def "]) == 0


@pytest.mark.parametrize("damage", ["bit", "short", "missing"])
def test_a_damaged_share_is_refused_by_name(two: Path, tmp_path: Path, damage: str) -> None:
    copy = Path(shutil.copytree(two / "own-fsdp", tmp_path / "run"))
    shutil.rmtree(copy / "checkpoints" / "step-00000008")
    file = copy / "checkpoints" / "step-00000006" / "optimizer-00001-of-00002.safetensors"
    content = bytearray(file.read_bytes())
    if damage == "bit":
        content[-3] ^= 1
        file.write_bytes(content)
    elif damage == "short":
        file.write_bytes(content[:-9])
    else:
        file.unlink()
    said = {"bit": "is corrupt", "short": "is cut short", "missing": "is missing"}[damage]
    with pytest.raises(WakefulError, match=rf"optimizer-00001.*{said}.*; delete"):
        train(Config(), copy, resume=True)
    manifest = file.parent / "manifest.json"
    entries = json.loads(manifest.read_text())
    for name in ("../model.safetensors", "model-00002-of-00003.safetensors"):
        manifest.write_text(json.dumps({**entries, name: entries["state.json"]}))
        with pytest.raises(WakefulError, match=r"no readable manifest\.json"):
            checkpoint.verify(file.parent)


@pytest.mark.parametrize(
    "cut",
    [[], {"model": 3}, {"model": {"norm.weight": {"dim": -1}}}, {"model": {"norm.weight": {}}},
     {"model": {"norm.weight": {"dim": 7}}}, {"model": {"norm.weight": {"dim": "x"}}}],
)  # fmt: skip
def test_a_description_of_shares_that_cannot_be_is_refused(
    two: Path, tmp_path: Path, cut: Any
) -> None:
    run = Run.open(two / "own-fsdp")
    copy = Path(shutil.copytree(run.checkpoints / "step-00000006", tmp_path / "step-00000006"))
    content = json.dumps({**json.loads((copy / "state.json").read_text()), "cut": cut}).encode()
    (copy / "state.json").write_bytes(content)
    manifest = json.loads((copy / "manifest.json").read_text())
    digest = hashlib.sha256(content).hexdigest()
    manifest["state.json"] = {"bytes": len(content), "sha256": digest}
    (copy / "manifest.json").write_text(json.dumps(manifest))
    said = r"cannot be read|of another model|how tensors are cut"
    with pytest.raises(WakefulError, match=said) as caught:
        checkpoint.load_model(copy, Decoder(run.config.model))
    assert "\n" not in str(caught.value)


def test_a_resumed_run_of_as_many_processes_is_the_same_to_the_bit(two: Path) -> None:
    for cut, whole in (("cut", "own-fsdp"), ("replicas-cut", "own-ddp")):
        mine, theirs = Run.open(two / cut), Run.open(two / whole)
        assert losses(mine) == losses(theirs)
        for name, tensor in weights(theirs).items():
            assert torch.equal(weights(mine)[name], tensor), name
        ends = [run.read_json("summary.json") for run in (mine, theirs)]
        assert ends[0]["validation"] == ends[1]["validation"]
        assert ends[0]["samples"] == ends[1]["samples"]


def test_a_run_goes_on_with_another_number_of_processes(folder: Path, two: Path) -> None:
    one = alone(folder, "haar")
    fewer = two / "two-then-one"
    assert Run.open(fewer).header["status"] == "stopped"
    assert (
        checkpoint.newest(fewer / "checkpoints") / "optimizer-00001-of-00002.safetensors"
    ).exists()
    assert_alike(train(Config(), fewer, resume=True), one, SUMS["float32"])
    assert_alike(Run.open(two / "one-then-two"), one, SUMS["float32"])


def test_what_cannot_be_shared_out_is_refused_and_leaves_nothing(two: Path) -> None:
    for name, message in (
        ("odd", "train.batch_size = 5 cannot be shared evenly by 2 processes; use 4 or 6"),
        ("eigenbasis", "optimizer.rotation = 'eigenbasis' learns from whole gradients"),
    ):
        assert message in (two / f"{name}.error").read_text()
        assert not (two / name).exists()


def test_a_batch_that_is_no_number_on_one_process_stops_all(folder: Path, two: Path) -> None:
    run = Run.open(two / "nan")
    error = (two / "nan.error").read_text()
    assert "the loss is nan at step 5" in error
    assert "the checkpoint of step 3 is kept" in error
    config = run.config
    batches = Batches(load_data(config.data).train, length=16, batch_size=4, seed=config.train.seed)
    assert ", ".join(str(start) for start in batches.starts(4)) in error
    assert run.header["status"] == "stopped"
    assert [row["step"] for row in run.metrics() if row["kind"] == "train"] == [1, 2, 3, 4]
    resumed = train(Config(), run.path, resume=True)
    assert losses(resumed) == pytest.approx(losses(alone(folder, "own")), rel=1e-6)


def test_a_killed_process_ends_all_and_the_run_goes_on(folder: Path) -> None:
    config = config_of(folder, {"train": {"steps": 60, "checkpoint_every": 10, "eval_every": 0}})
    (folder / "config.toml").write_text(config_to_toml(config))
    path = folder / "killed"
    running = processes.start(2, "train", str(folder / "config.toml"), "--out", str(path))
    processes.wait_for_rows(path, 15)
    everybody = processes.workers(running)
    began = time.monotonic()
    os.kill(everybody[1], signal.SIGKILL)
    time.sleep(0.02)
    os.kill(everybody[0], signal.SIGTERM)  # torchrun sends it too, a little later
    status, _, errors = processes.ended(running)
    assert time.monotonic() - began < processes.ENDS_WITHIN
    assert status == 1
    assert not any(Path(f"/proc/{number}").exists() for number in everybody.values())
    (line,) = processes.said(errors)
    assert "another process of this run is gone" in line
    assert (
        f"0 is kept; continue with: torchrun [as before] -m wakeful train --resume {path}" in line
    )
    run = Run.open(path)
    assert run.header["status"] == "stopped"
    assert checkpoint.steps(run.checkpoints)[-1] >= 10
    one = train(config, folder / "one" / "long")
    assert_alike(train(Config(), path, resume=True), one, 1e-5)  # 60 steps of rounding


def test_a_run_that_another_process_works_in_is_refused_once(two: Path, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(two / "own-fsdp", tmp_path / "run")))
    before = sorted(file.name for file in run.path.iterdir())
    with run.lock():
        status, _, errors = processes.ended(processes.start(2, "train", "--resume", str(run.path)))
    assert status == 1
    (line,) = processes.said(errors)
    assert "another process is working in" in line
    assert sorted(file.name for file in run.path.iterdir()) == sorted({*before, ".lock"})
    assert run.header["status"] == "done"


def test_shares_of_a_batch(tmp_path: Path) -> None:
    four = World(rank=1, size=4)
    config = tiny(tmp_path, train={"batch_size": 12, "micro_batch_size": 6})
    check_shares(config, four)  # a share of 3 is below the most at once
    with pytest.raises(WakefulError, match="micro_batch_size = 2 does not divide the 3 sequences"):
        check_shares(tiny(tmp_path, train={"batch_size": 12, "micro_batch_size": 2}), four)
    with pytest.raises(WakefulError, match=r"batch_size = 3 .* by 4 processes; use 4 or more"):
        check_shares(tiny(tmp_path, train={"batch_size": 3}), four)


def test_an_environment_of_half_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for size in ("2", "many"):
        monkeypatch.setenv("WORLD_SIZE", size)
        with pytest.raises(WakefulError, match=r"start several processes with torchrun, or unset"):
            started_as()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert started_as() == (0, 1)


def test_verbs_of_one_process_refuse_several(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert main(["report", "nowhere"]) == 1
    assert (
        "report takes one process (several are for train, diagnose, evaluate)"
        in capsys.readouterr().err
    )


@pytest.mark.slow
def test_four_processes_compute_what_one_does_and_share_with_two(folder: Path, two: Path) -> None:
    out = folder / "four"
    shutil.copytree(two / "cut", out / "two-then-four")
    shutil.rmtree(out / "two-then-four" / "checkpoints" / "step-00000008")
    jobs = [
        job(out / f"{name}-{parallel}", config_of(folder, over, parallel))
        for name, over in CASES.items()
        for parallel in ("fsdp", "ddp")
    ]
    together(folder, 4, [*jobs, job(out / "two-then-four")])
    for name in CASES:
        one = alone(folder, name)
        for parallel in ("fsdp", "ddp"):
            assert_alike(Run.open(out / f"{name}-{parallel}"), one, SUMS[one.config.train.dtype])
    assert_alike(Run.open(out / "two-then-four"), alone(folder, "own"), SUMS["float32"])


@pytest.mark.slow
def test_two_machines_of_two_processes_each_hold_the_whole(folder: Path) -> None:
    out = folder / "machines"
    names = ("resformer", "neutreno", "haar")
    jobs = [job(out / name, config_of(folder, CASES[name], "hsdp")) for name in names]
    jobs += [job(out / "cut", config_of(folder, CASES["haar"], "hsdp"), stop=5), job(out / "cut")]
    jobs += [job(out / "hsdp-then-one", config_of(folder, CASES["haar"], "hsdp"), stop=5)]
    (folder / "machines.json").write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = ("--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "test",
               "--rdzv-endpoint", f"127.0.0.1:{port}")  # fmt: skip
    file = str(folder / "machines.json")
    machines = [
        processes.start(2, file, module="train.processes", meeting=meeting) for _ in range(2)
    ]
    for machine in machines:
        status, _, errors = processes.ended(machine)
        assert status == 0, errors
    for name in names:
        assert_alike(Run.open(out / name), alone(folder, name), SUMS["float32"])
        middle = Run.open(out / name).checkpoints / "step-00000006"
        shares = sorted(file.name for file in middle.glob("*.safetensors"))
        assert shares == [f"{what}-0000{part}-of-00002.safetensors"
                          for what in ("model", "optimizer") for part in (0, 1)]  # fmt: skip
    assert losses(Run.open(out / "cut")) == losses(Run.open(out / "haar"))
    resumed = train(Config(), out / "hsdp-then-one", resume=True)
    assert_alike(resumed, alone(folder, "haar"), SUMS["float32"])


@pytest.mark.slow
def test_given_weights_and_a_teacher_on_two_processes(folder: Path) -> None:
    teacher = alone(folder, "resformer").path
    over = {"train": {"steps": 4, "distill": {"teacher": str(teacher), "alpha": 0.5}}}
    ones, jobs = {}, []
    for name, initial in (("taught", None), ("given", teacher)):
        here = {**over, "model": CASES["resformer"]["model"]} if initial else over
        for parallel in ("fsdp", "ddp"):
            config = config_of(folder, here, parallel)
            jobs.append(job(folder / f"{name}-{parallel}", config, initial=initial))
        start = Initial(restore(initial).decoder, {"from": str(initial)}) if initial else None
        ones[name] = train(config, folder / "one" / name, initial=start)
    together(folder, 2, jobs)
    for name, one in ones.items():
        for parallel in ("fsdp", "ddp"):
            assert_alike(Run.open(folder / f"{name}-{parallel}"), one, SUMS["float32"])


@pytest.mark.slow
def test_every_route_is_right_on_shares_with_recomputed_activations(folder: Path) -> None:
    cases = {
        f"{variant.__name__}-{number}": {
            "model": {FIELDS[kind]: expression, "num_layers": 4},
            "train": {"steps": 3, "checkpoint_every": 0, "eval_every": 0, "dtype": "float64",
                      "checkpoint_activations": True, "micro_batch_size": 1},
        }
        for kind in FIELDS
        for variant in variants(kind).values()
        for number, expression in enumerate(variant.examples)
    }  # fmt: skip
    configs = {name: config_of(folder, over) for name, over in cases.items()}
    together(folder, 2, [job(folder / "every" / n, config) for n, config in configs.items()])
    for name, config in configs.items():
        plain = train(config, folder / "one" / name)
        assert_alike(Run.open(folder / "every" / name), plain, SUMS["float64"])


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "number"), [(0, signal.SIGKILL), (-1, signal.SIGTERM)])
def test_the_first_process_killed_or_all_stopped_loses_nothing(
    folder: Path, tmp_path: Path, rank: int, number: signal.Signals
) -> None:
    config = config_of(folder, {"train": {"steps": 60, "checkpoint_every": 10, "eval_every": 0}})
    (tmp_path / "config.toml").write_text(config_to_toml(config))
    path = tmp_path / "run"
    running = processes.start(3 if rank else 2, "train", str(tmp_path / "config.toml"),
                              "--out", str(path), "--train.batch-size", "6")  # fmt: skip
    processes.wait_for_rows(path, 15)
    os.kill(running.pid if rank < 0 else processes.workers(running)[rank], number)
    _, _, errors = processes.ended(running)
    (line,) = processes.said(errors)
    kept = checkpoint.steps(path / "checkpoints")[-1]
    if rank < 0:
        assert f"stopped by SIGTERM after step {kept}, which is saved; continue with" in line
    else:
        assert "another process of this run is gone" in line
    again = processes.start(2, "train", "--resume", str(path))
    status, _, errors = processes.ended(again)
    assert status == 0, errors
    steps = [row["step"] for row in Run.open(path).metrics() if row["kind"] == "train"]
    assert steps == list(range(1, 61))


@pytest.mark.slow
def test_compiled_blocks_compute_the_same(folder: Path) -> None:
    over: Table = {"model": {"route": 'resformer(mode="learnable")'}, "train": {"steps": 3}}
    plain = train(config_of(folder, over), folder / "one" / "plain")
    over = {**over, "train": {"steps": 3, "compile": True}}
    jobs = [job(folder / "compiled" / p, config_of(folder, over, p)) for p in ("fsdp", "ddp")]
    together(folder, 2, jobs)
    for parallel in ("fsdp", "ddp"):
        assert losses(Run.open(folder / "compiled" / parallel)) == pytest.approx(
            losses(plain), rel=1e-5
        )
