"""Runs that several processes share, for the tests: the cases, and how they are compared."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from training import processes
from training.runs import tiny, write_text
from wakeful.config.schema import Config, config_to_table
from wakeful.config.tables import TomlTable
from wakeful.runs.run import Run
from wakeful.training.loop import train_run

CASES: dict[str, TomlTable] = {
    "own": {"train": {"diagnose": {"every": 4, "num_sequences": 3}, "eval_batch_size": 7}},
    "resformer": {"model": {"route": 'resformer(mode="learnable")', "tied": True}},
    "svformer": {"model": {"route": "svformer", "normalizer": "softmax1(learned=True)"}},
    "neutreno": {"model": {"route": "neutreno", "tied": True, "num_kv_heads": 1},
                 "train": {"checkpoint_activations": True, "micro_batch_size": 1}},
    "denseformer": {"model": {"route": "gated", "depth": "denseformer", "num_layers": 3},
                    "train": {"micro_batch_size": 1, "dtype": "float64"}},
    "hadamard": {"optimizer": {"name": "orthoadam"}},
    "haar": {"optimizer": {"name": "orthoadam", "rotation": "haar"}},
}  # fmt: skip
"""Configurations trained on one process, on shares and on replicas."""
SUMS = {"float32": 1e-6, "float64": 1e-12}
"""Relative tolerances of losses and gradient norms for sums in another order."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Give a folder with text and a cache of its own, shared by the runs of this file."""
    here = tmp_path_factory.mktemp("processes")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WAKEFUL_CACHE", str(here / "cache"))
        write_text(here / "text")
        yield here


def config_of(folder: Path, over: TomlTable, parallel: str = "fsdp") -> Config:
    over = {**over, "train": {**over.get("train", {}), "parallel": parallel}}
    return tiny(folder / "text", **over)


def job(
    out: Path,
    config: Config | None = None,
    *,
    stop: int = 0,
    nan: tuple[int, int] | None = None,
    initial: Path | None = None,
) -> TomlTable:
    """Return an entry of a job file; without a configuration it resumes."""
    return {
        "out": str(out),
        "config": config and config_to_table(config),
        "resume": not config,
        "stop": stop,
        "nan": nan,
        "initial": initial and str(initial),
    }


def together(folder: Path, number: int, jobs: list[TomlTable]) -> None:
    """Do jobs, one after the other, in `number` processes."""
    file = folder / f"jobs-{number}.json"
    file.write_text(json.dumps(jobs))
    status, _, errors = processes.ended(
        processes.start(number, str(file), module="training.processes")
    )
    assert status == 0, errors


def alone(folder: Path, name: str) -> Run:
    """Return the run of a case in one process."""
    path = folder / "one" / name
    return Run.open(path) if path.exists() else train_run(config_of(folder, CASES[name]), path)


def assert_alike(run: Run, single_process: Run, tolerance: float) -> None:
    """Check that all figures of a run are those of another to a relative tolerance."""
    mine, expected = run.metrics(), single_process.metrics()
    assert [(row["kind"], row["step"]) for row in mine] == [
        (row["kind"], row["step"]) for row in expected
    ]
    for here, there in zip(mine, expected, strict=True):
        keys = here.keys() - {"seconds", "tokens_per_second", "standard_error"}
        assert keys == there.keys() - {"seconds", "tokens_per_second", "standard_error"}
        for key in keys - {"kind"}:
            assert here[key] == pytest.approx(there[key], rel=tolerance), (here["step"], key)
