"""Runs of several processes, the slow checks: four of them, every route."""

from pathlib import Path

import pytest

from training.shares import CASES, SUMS, alone, assert_alike, config_of, job, together
from training.test_loop import losses
from wakeful.config.tables import TomlTable
from wakeful.loading.load import read_decoder
from wakeful.runs.run import Run
from wakeful.training.loop import Initial, train_run
from wakeful.variants import variants_by_name

FIELDS = {"routes": "route", "depth": "depth", "normalizers": "normalizer"}


@pytest.mark.long
def test_four_processes_compute_what_one_does_and_share_with_two(folder: Path) -> None:
    out = folder / "four"
    together(folder, 2, [job(out / "two-then-four", config_of(folder, CASES["own"]), stop=5)])
    jobs = [
        job(out / f"{name}-{parallel}", config_of(folder, over, parallel))
        for name, over in CASES.items()
        for parallel in ("fsdp", "ddp")
    ]
    together(folder, 4, [*jobs, job(out / "two-then-four")])
    for name in CASES:
        expected = alone(folder, name)
        for parallel in ("fsdp", "ddp"):
            assert_alike(
                Run.open(out / f"{name}-{parallel}"), expected, SUMS[expected.config.train.dtype]
            )
    assert_alike(Run.open(out / "two-then-four"), alone(folder, "own"), SUMS["float32"])


@pytest.mark.long
def test_given_weights_and_a_teacher_on_two_processes(folder: Path) -> None:
    teacher = alone(folder, "resformer").path
    over = {"train": {"steps": 4, "distill": {"teacher": str(teacher), "alpha": 0.5}}}
    ones, jobs = {}, []
    for name, initial in (("taught", None), ("given", teacher)):
        here = {**over, "model": CASES["resformer"]["model"]} if initial else over
        for parallel in ("fsdp", "ddp"):
            config = config_of(folder, here, parallel)
            jobs.append(job(folder / f"{name}-{parallel}", config, initial=initial))
        start = (
            Initial(read_decoder(initial, dtype="auto").decoder(), {"from": str(initial)})
            if initial
            else None
        )
        ones[name] = train_run(config, folder / "one" / name, initial=start)
    together(folder, 2, jobs)
    for name, expected in ones.items():
        for parallel in ("fsdp", "ddp"):
            assert_alike(Run.open(folder / f"{name}-{parallel}"), expected, SUMS["float32"])


@pytest.mark.long
def test_every_route_is_right_on_shares_with_recomputed_activations(folder: Path) -> None:
    cases = {
        f"{variant.__name__}-{number}": {
            "model": {FIELDS[kind]: expression, "num_layers": 4},
            "train": {"steps": 3, "checkpoint_every": 0, "eval_every": 0, "dtype": "float64",
                      "checkpoint_activations": True, "micro_batch_size": 1},
        }
        for kind in FIELDS
        for variant in variants_by_name(kind).values()
        for number, expression in enumerate(variant.examples)
    }  # fmt: skip
    configs = {name: config_of(folder, over) for name, over in cases.items()}
    together(folder, 2, [job(folder / "every" / n, config) for n, config in configs.items()])
    for name, config in configs.items():
        plain = train_run(config, folder / "one" / name)
        assert_alike(Run.open(folder / "every" / name), plain, SUMS["float64"])


@pytest.mark.long
def test_compiled_blocks_compute_the_same(folder: Path) -> None:
    over: TomlTable = {"model": {"route": 'resformer(mode="learnable")'}, "train": {"steps": 3}}
    plain = train_run(config_of(folder, over), folder / "one" / "plain")
    over = {**over, "train": {"steps": 3, "compile": True}}
    jobs = [job(folder / "compiled" / p, config_of(folder, over, p)) for p in ("fsdp", "ddp")]
    together(folder, 2, jobs)
    for parallel in ("fsdp", "ddp"):
        assert losses(Run.open(folder / "compiled" / parallel)) == pytest.approx(
            losses(plain), rel=1e-5
        )
