"""Several variants and seeds: paired, resumable, and never of different things."""

import contextlib
import dataclasses
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import polars as pl
import pytest
import torch

from training.runs import tiny
from wakeful.config.schema import Config, config_to_table, read_seeds, split_variants
from wakeful.errors import Interrupted, WakefulError
from wakeful.runs.run import Run
from wakeful.terminal.display import Display
from wakeful.training import rows as comparison
from wakeful.training.compared import read_comparison
from wakeful.training.loop import train_run
from wakeful.training.rows import train_variants

SHORT = {"steps": 2, "eval_every": 0, "checkpoint_every": 1, "batch_size": 2}


@contextlib.contextmanager
def silent(_: str) -> Iterator[Display]:
    yield Display()


def two(text: Path, **over: dict) -> dict[str, Config]:
    changes = {"train": SHORT | over.pop("train", {}), **over}
    return {
        "plain": tiny(text, **changes),
        "cured": tiny(text, **changes, model={"route": "svformer"}),
    }


def files(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_twins_are_paired_window_by_window(text: Path, tmp_path: Path) -> None:
    run = train_variants(two(text), tmp_path / "cmp", seeds=[3, 1], display=silent)
    header = run.header
    assert (header.kind, header.status, header.baseline) == ("compare", "done", "plain")
    assert (header.variants, header.seeds) == (("plain", "cured"), (3, 1))
    first = {}
    for seed in (3, 1):
        frames = []
        for name in ("plain", "cured"):
            path = run.path / name / f"seed-{seed}"
            single_run = Run.open(path)
            assert single_run.config.train.seed == seed
            frames.append(pl.read_parquet(path / "validation.parquet"))
            first[name, seed] = single_run.metrics()[0]["loss"]
        assert frames[0]["tokens"].equals(frames[1]["tokens"])
    assert first["plain", 3] != first["plain", 1]


@pytest.mark.slow
def test_a_signal_ends_it_with_the_way_to_go_on(text: Path, tmp_path: Path) -> None:
    class Ends(Display):
        def step(self, *_: object) -> None:
            os.kill(os.getpid(), signal.SIGTERM)

    @contextlib.contextmanager
    def ending(_: str) -> Iterator[Display]:
        yield Ends()

    message = r"plain, seed 4: stopped by SIGTERM after step 1, which is saved; continue with the "
    with pytest.raises(Interrupted, match=message + "same command and --resume"):
        train_variants(two(text), tmp_path / "cmp", seeds=[4], display=ending)
    assert Run.open(tmp_path / "cmp").header.status == "stopped"
    run = train_variants(two(text), tmp_path / "cmp", seeds=[4], display=silent, resume=True)
    assert run.header.status == "done"


@pytest.mark.slow
def test_a_signal_after_a_run_s_last_step_stops_those_that_follow(
    text: Path, tmp_path: Path
) -> None:
    class Ends(Display):
        def step(self, step: int, steps: int, *_: object) -> None:
            if step == steps:
                os.kill(os.getpid(), signal.SIGTERM)

    @contextlib.contextmanager
    def ending(_: str) -> Iterator[Display]:
        yield Ends()

    message = "plain, seed 4: stopped by SIGTERM after the last step, and the run is done; continue"
    with pytest.raises(Interrupted, match=message):
        train_variants(two(text), tmp_path / "cmp", seeds=[4], display=ending)
    assert Run.open(tmp_path / "cmp/plain/seed-4").header.status == "done"
    assert not (tmp_path / "cmp/cured").exists()


@pytest.mark.slow
def test_a_comparison_that_fails_goes_on_where_it_was(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted = train_variants(two(text), tmp_path / "whole", seeds=[0], display=silent)
    folders: list[Path] = []

    def fails_second(config: Config, run_folder: Path, **options: object) -> Run:
        folders.append(run_folder)
        if len(folders) == 2:
            raise WakefulError("the power is gone")
        return train_run(config, run_folder, **options)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(comparison, "train_run", fails_second)
    with pytest.raises(WakefulError, match="power"):
        train_variants(two(text), tmp_path / "cut", seeds=[0], display=silent)
    assert Run.open(tmp_path / "cut").header.status == "stopped"
    before = files(tmp_path / "cut" / "plain")
    with pytest.raises(WakefulError, match="exists already"):
        train_variants(two(text), tmp_path / "cut", seeds=[0], display=silent)
    run = train_variants(two(text), tmp_path / "cut", seeds=[0], display=silent, resume=True)
    assert run.header.status == "done"
    assert [run_folder.parent.name for run_folder in folders] == ["plain", "cured", "cured"]
    assert files(tmp_path / "cut" / "plain") == before
    for name in ("plain", "cured"):
        first, second = (
            pl.read_parquet(folder / name / "seed-0" / "validation.parquet")
            for folder in (uninterrupted.path, run.path)
        )
        assert first.equals(second)


@pytest.mark.slow
def test_a_half_trained_twin_is_continued_not_begun_again(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, losses = torch.nn.utils.clip_grad_norm_, []

    def clip(*arguments: object) -> torch.Tensor:
        losses.append(1)
        if len(losses) == 2:
            raise KeyboardInterrupt
        return real(*arguments)  # pyright: ignore[reportArgumentType]

    with monkeypatch.context() as patch:
        patch.setattr(torch.nn.utils, "clip_grad_norm_", clip)
        with pytest.raises(KeyboardInterrupt):
            train_variants(two(text), tmp_path / "cut", seeds=[0], display=silent)
    assert Run.open(tmp_path / "cut" / "plain" / "seed-0").header.status == "stopped"
    resumed: list[bool] = []

    def recorded(config: Config, folder: Path, *, resume: bool, show: Display) -> Run:
        resumed.append(resume)
        return train_run(config, folder, resume=resume, show=show)

    monkeypatch.setattr(comparison, "train_run", recorded)
    train_variants(two(text), tmp_path / "cut", seeds=[0], display=silent, resume=True)
    assert resumed == [True, False]


@pytest.mark.slow
def test_resuming_what_is_not_a_comparison_is_refused(text: Path, tmp_path: Path) -> None:
    run = train_run(tiny(text), tmp_path / "run")
    with pytest.raises(WakefulError, match=r"is not a comparison: run\.json calls it"):
        train_variants(two(text), run.path, seeds=[0], display=silent, resume=True)


@pytest.mark.slow
def test_resuming_another_comparison_is_refused(text: Path, tmp_path: Path) -> None:
    train_variants(two(text), tmp_path / "cmp", seeds=[0], display=silent)
    before = files(tmp_path / "cmp")
    for variants, seeds, message in (
        ({"else": two(text)["plain"]}, [0], "compares plain, cured, and none of else: choose"),
        (
            two(text) | {"long": tiny(text, train={"steps": 2, "length": 8})},
            [0],
            "long and plain cannot be compared: their train.length differs",
        ),
        (
            two(text, train={"steps": 3}),
            [0],
            "plain/seed-0 was begun with another configuration .*: train.steps was 2 and is 3; ",
        ),
        (  # a seed of its own does not make it another variant
            two(text, optimizer={"lr": 1e-3}),
            [1],
            "plain/seed-0 was begun with .*: optimizer.lr was 0.003 and is 0.001; restore it, give",
        ),
    ):
        with pytest.raises(WakefulError, match=message):
            train_variants(variants, tmp_path / "cmp", seeds=seeds, display=silent, resume=True)
    with pytest.raises(WakefulError, match="not a run directory"):
        train_variants(two(text), tmp_path / "none", seeds=[0], display=silent, resume=True)
    assert files(tmp_path / "cmp") == before
    with pytest.raises(WakefulError, match="seeds names one twice"):
        train_variants(two(text), tmp_path / "twice", seeds=[4, 4], display=silent)
    assert not (tmp_path / "twice").exists()


@pytest.mark.slow
def test_a_variant_that_diverges_is_left_out_and_the_others_go_on(
    text: Path, tmp_path: Path
) -> None:
    class Notes(Display):
        def note(self, text: str) -> None:
            notes.append(text)

    @contextlib.contextmanager
    def noting(_: str) -> Iterator[Display]:
        yield Notes()

    notes: list[str] = []
    rates = {"lr": 1e38, "final_lr": 1e38, "initial_lr": 1e38, "warmup_steps": 0, "clip": 0.0}
    wild = tiny(text, train=SHORT, optimizer=rates | {"name": "torch.optim:SGD"})
    rows = two(text)
    rows = {"plain": rows["plain"], "wild": wild, "cured": rows["cured"]}
    run = train_variants(rows, tmp_path / "cmp", seeds=[0], display=noting)
    assert run.header.status == "stopped"
    assert [Run.open(run.path / name / "seed-0").header.status for name in rows] == [
        "done", "stopped", "done"
    ]  # fmt: skip
    (message,) = (note for note in notes if "go on" in note)
    assert message.startswith("wild, seed 0: ")
    assert "Lower optimizer.lr" in message
    actual = read_comparison(run.path)
    assert actual.variants == ("plain", "cured")
    assert actual.unfinished == ("wild, seed 0",)
    train_variants(
        {"wild": wild}, run.path, seeds=[0], display=noting, resume=True
    )  # plain is the baseline
    with pytest.raises(WakefulError, match="Lower optimizer"):
        train_variants(
            {"wild": wild, "plain": rows["plain"]}, tmp_path / "first", seeds=[0], display=noting
        )


@pytest.mark.slow
def test_a_comparison_grows_by_variants_and_seeds(text: Path, tmp_path: Path) -> None:
    rows = two(text) | {"third": dataclasses.replace(two(text)["cured"], name="third")}
    uninterrupted = train_variants(rows, tmp_path / "whole", seeds=[0, 1], display=silent)
    some = {name: rows[name] for name in ("plain", "cured")}
    train_variants(some, tmp_path / "cmp", seeds=[0], display=silent)
    before = files(tmp_path / "cmp" / "plain" / "seed-0")
    fewer_rows = {name: rows[name] for name in ("plain", "third")}
    run = train_variants(fewer_rows, tmp_path / "cmp", seeds=[0], display=silent, resume=True)
    assert (run.header.variants, run.header.status) == (("plain", "cured", "third"), "done")
    run = train_variants(fewer_rows, tmp_path / "cmp", seeds=[1], display=silent, resume=True)
    assert (run.header.seeds, run.header.status) == ((0, 1), "stopped")  # cured lacks its second
    run = train_variants(
        rows, tmp_path / "cmp", seeds=[0, 1], display=silent, resume=True, layouts=["own/arena"]
    )
    assert (run.header.status, run.header.layouts) == ("done", ("own/arena",))
    assert files(tmp_path / "cmp" / "plain" / "seed-0") == before
    for path in ("third/seed-1", "cured/seed-1", "third/seed-0"):
        frames = [
            pl.read_parquet(r.path / path / "validation.parquet") for r in (uninterrupted, run)
        ]
        assert frames[0].equals(frames[1])


def test_variants_change_only_what_they_name() -> None:
    table = {
        "seeds": [1],
        "model": {"width": 64, "route": "own"},
        "variants": {"a": {}, "b": {"model": {"route": "svformer"}, "train": {"steps": 7}}},
    }
    assert split_variants("file", table) == {
        "a": {"name": "a", "model": {"width": 64, "route": "own"}},
        "b": {"name": "b", "model": {"width": 64, "route": "svformer"}, "train": {"steps": 7}},
    }
    assert split_variants("file", config_to_table(Config()))["file"]["name"] == "file"


@pytest.mark.parametrize(
    ("variants", "message"),
    [
        (3, "must be a table"),
        ({}, "must be a table"),
        ({"a": 3}, "variants.'a' must be a table, got 3"),
        ({"": {}}, "becomes its folder's"),
        ({"..": {}}, "becomes its folder's"),
        ({"a/b": {}}, "becomes its folder's"),
        ({"a\0": {}}, "becomes its folder's"),
        ({"report.html": {}}, "becomes its folder's"),
        ({"run.json": {}}, "becomes its folder's"),
        ({"two\nlines": 3}, r"'two\\nlines'"),
    ],
)
def test_variants_without_a_folder_of_their_own_are_refused(variants: object, message: str) -> None:
    with pytest.raises(WakefulError, match=message) as caught:
        split_variants("file", {"variants": variants})
    assert "\n" not in str(caught.value)


def test_seeds_are_a_list_of_whole_numbers() -> None:
    assert read_seeds({}) == [0]
    assert read_seeds({"seeds": [3, 1]}) == [3, 1]
    for seeds in ([], 3, ["1"], [1.0], [True], {}):
        with pytest.raises(WakefulError, match="seeds must be a list of whole numbers"):
            read_seeds({"seeds": seeds})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": {"route": "resformers"}}, "b: unknown route"),
        ({"model": {"normalizer": "softmax1(x=1)"}}, "b: "),
        ({"optimizer": {"name": "adamm"}}, "b: optimizer='adamm' is not one of"),
        ({"optimizer": {"name": "orthoadam", "rotation": "spin"}}, "b: .*'spin'"),
        ({"optimizer": {"name": "muon(momentum=2.0)"}}, "b: muon: .*momentum"),
        ({"train": {"quantize": {"schemes": ["finer"]}}}, "b: "),
        ({"train": {"device": "tpu"}}, "b: train.device = 'tpu'"),
        ({"train": {"distill": {"teacher": "/nowhere"}}}, "b: "),
        ({"train": {"length": 8}}, "b and a cannot be compared: their train.length differ"),
        ({"data": {"vocab_size": 300}}, "b and a cannot be compared: their tokenizer differ"),
        ({"data": {"source": "/nowhere"}}, "b: "),
    ],
)
def test_a_fault_of_the_last_variant_is_found_before_the_first_is_trained(
    text: Path, tmp_path: Path, change: dict, message: str
) -> None:
    with pytest.raises(WakefulError, match=message):
        train_variants({"a": tiny(text), "b": tiny(text, **change)}, tmp_path / "c", seeds=[0],
                display=silent)  # fmt: skip
    assert not (tmp_path / "c").exists()
