"""Resuming on anything else than what the run was begun with is refused."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from training.faults import left_by
from training.runs import tiny, write_text
from training.test_loop import stop_after
from wakeful.config.schema import Config
from wakeful.data.preparing import prepare
from wakeful.errors import WakefulError
from wakeful.runs.run import Run
from wakeful.training.loop import train_run


def test_an_existing_run_is_not_overwritten(text: Path, tmp_path: Path) -> None:
    run = train_run(tiny(text), tmp_path / "run")
    before = {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}
    with pytest.raises(WakefulError, match="exists already"):
        train_run(tiny(text), tmp_path / "run")
    assert {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()} == before


@pytest.mark.slow
def test_resuming_on_other_text_is_refused(text: Path, tmp_path: Path) -> None:
    train_run(tiny(text), tmp_path / "run")
    write_text(text, documents=61)
    with pytest.raises(WakefulError, match="other data"):
        train_run(Config(), tmp_path / "run", resume=True)


@pytest.mark.slow
def test_a_lost_cache_is_prepared_again(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uncut: dict[str, Any]
) -> None:
    with monkeypatch.context() as patch:
        stop_after(patch, 4)
        with pytest.raises(RuntimeError, match="stop"):
            train_run(tiny(text), tmp_path / "run")
    shutil.rmtree(tmp_path / "cache")
    assert left_by(train_run(Config(), tmp_path / "run", resume=True)) == uncut
    shutil.rmtree(text)
    with pytest.raises(WakefulError, match="text"):
        train_run(Config(), tmp_path / "run", resume=True)


@pytest.mark.slow
def test_resuming_on_another_validation_set_is_refused(text: Path, tmp_path: Path) -> None:
    held = write_text(tmp_path / "held", documents=3, words=33)
    before = (held / "001.txt").read_text()
    own = {"validation_source": str(held), "keep_overlap": True}
    train_run(tiny(text, data=own), tmp_path / "run")
    (held / "001.txt").write_text(before.replace("x", "y"))
    with pytest.raises(WakefulError, match=r"other data than data\.source gives now"):
        train_run(Config(), tmp_path / "run", resume=True)
    (held / "001.txt").write_text(before)
    assert train_run(Config(), tmp_path / "run", resume=True).header.status == "done"


def test_resuming_on_another_split_of_prepared_data_is_refused(text: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    prepare(str(text), data, vocab_size=280, validation_fraction=0.1)
    train_run(tiny(text, data={"source": str(data)}), tmp_path / "run")
    shutil.rmtree(data)
    prepare(str(text), data, vocab_size=280, validation_fraction=0.1, seed=1)
    with pytest.raises(WakefulError, match=r"other data than data\.source gives now"):
        train_run(Config(), tmp_path / "run", resume=True)


def test_resuming_with_another_optimizer_is_refused(stopped: Run) -> None:
    file = stopped.path / "config.toml"
    file.write_text(file.read_text().replace('"adamw"', '"muon"'))
    with pytest.raises(WakefulError, match="written with the optimizer AdamW, not MuonAdamW"):
        train_run(Config(), stopped.path, resume=True)


def test_a_resumed_run_writes_where_no_key_of_its_folder_points(
    stopped: Run, tmp_path: Path
) -> None:
    """`train.distill.store` once named a folder of a teacher's predictions, outside of the run."""
    outside = tmp_path / "outside"
    file = stopped.path / "config.toml"
    before = file.read_text("utf-8")
    assert "[train.distill]" in before
    planted = f'[train.distill]\nstore = "{outside}"'
    file.write_text(before.replace("[train.distill]", planted), "utf-8")
    with pytest.raises(WakefulError, match=r"unknown key 'train\.distill\.store'"):
        train_run(Config(), stopped.path, resume=True)
    assert not outside.exists()
    file.write_text(before, "utf-8")
    new_files = set(tmp_path.rglob("*")) - set(stopped.path.rglob("*"))
    train_run(Config(), stopped.path, resume=True)
    assert set(tmp_path.rglob("*")) - set(stopped.path.rglob("*")) == new_files


@pytest.mark.slow
def test_a_run_that_ended_can_be_resumed_and_stays_the_same(
    text: Path, tmp_path: Path, uncut: dict[str, Any]
) -> None:
    train_run(tiny(text), tmp_path / "run")
    assert left_by(train_run(Config(), tmp_path / "run", resume=True)) == uncut


@pytest.mark.slow
def test_a_lengthened_run_goes_on_as_one_planned_that_long(text: Path, tmp_path: Path) -> None:
    longer = {"steps": 14, "checkpoint_every": 3, "eval_every": 3}
    run = train_run(tiny(text), tmp_path / "run")
    before = run.metrics()
    train_run(Config(), run.path, resume=True, steps=14)
    planned = train_run(tiny(text, train=longer), tmp_path / "planned")
    assert run.config == planned.config
    rows = [row for row in run.metrics() if row["kind"] == "train"]
    assert [row["step"] for row in rows] == list(range(1, 15))
    assert run.metrics()[: len(before)] == before
    rates = [row["lr"] for row in planned.metrics() if row["kind"] == "train"]
    assert [row["lr"] for row in rows[8:]] == rates[8:]
    assert rows[8]["lr"] > rows[7]["lr"]
    assert run.read_json("summary.json")["steps"] == 14
    assert run.header.status == "done"


@pytest.mark.slow
def test_a_lengthened_run_that_is_cut_off_resumes_to_the_bit(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uninterrupted = train_run(tiny(text), tmp_path / "whole")
    cut = Run.open(shutil.copytree(uninterrupted.path, tmp_path / "cut"))
    train_run(Config(), uninterrupted.path, resume=True, steps=14)
    with monkeypatch.context() as patch:
        stop_after(patch, 12)
        with pytest.raises(RuntimeError, match="stop"):
            train_run(Config(), cut.path, resume=True, steps=14)
    # What the shorter run ended with must not be taken for this one's.
    assert not (cut.path / "summary.json").exists()
    train_run(Config(), cut.path, resume=True)
    assert left_by(cut) == left_by(uninterrupted)


def test_a_run_is_not_shortened(text: Path, tmp_path: Path) -> None:
    run = train_run(tiny(text), tmp_path / "run")
    before = left_by(run)
    with pytest.raises(WakefulError, match=r"train\.steps = 7 is less than the 8"):
        train_run(Config(), run.path, resume=True, steps=7)
    assert left_by(run) == before
