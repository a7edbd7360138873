"""The run directory: whole or not there, and nothing in it lost."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from damage import largest_file
from wakeful.config.schema import Config, config_to_toml
from wakeful.config.tables import from_table, to_table
from wakeful.errors import WakefulError
from wakeful.runs.run import Environment, Run, environment


def made(path: Path, **fields: object) -> Run:
    """Make a run directory with a configuration."""
    with Run.create(path, "train", fields) as run:
        run.write_text("config.toml", config_to_toml(Config()))
    return Run.open(path)


def entries(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


def test_a_new_run_is_not_there_before_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "run"
    with Run.create(path, "train", {"name": "x"}) as run:
        run.write_text("config.toml", "name = 'x'\n")
        assert not path.exists()
    assert entries(path) == {"run.json", "config.toml"}
    assert entries(path.parent) == {"run"}
    header = Run.open(path).header
    assert (header.kind, header.name, header.status) == ("train", "x", "running")
    assert Run.open(path).config.name == "x"


def interrupted(path: Path) -> None:
    with Run.create(path, "train", {}) as run:
        run.write_text("config.toml", "")
        raise KeyboardInterrupt


@pytest.mark.parametrize("killed", [False, True])
def test_a_creation_that_ends_early_leaves_the_place_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    with monkeypatch.context() as patch:
        if killed:  # then nothing cleans up either
            patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(KeyboardInterrupt):
            interrupted(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    left = entries(tmp_path)  # of a killed process a hidden folder, which nothing fills again
    assert bool(left) == killed
    made(tmp_path / "run")
    made(tmp_path / "elsewhere" / "run")
    assert entries(tmp_path) == {"run", "elsewhere"} | left
    assert entries(tmp_path / "run") == entries(tmp_path / "elsewhere" / "run")


def test_what_exists_is_never_overwritten(tmp_path: Path) -> None:
    run = made(tmp_path / "run", name="mine")
    before = run.header
    for refused in (tmp_path / "run", tmp_path / "run" / "run.json"):
        with pytest.raises(WakefulError, match="exists already"):
            made(refused)
    with pytest.raises(WakefulError, match="Not a directory"):
        made(tmp_path / "run" / "run.json" / "below")
    with pytest.raises(WakefulError, match="File name too long"):
        made(tmp_path / ("x" * 300))
    assert run.header == before
    (tmp_path / "empty").mkdir()
    assert made(tmp_path / "empty").header.status == "running"


@pytest.mark.parametrize(
    ("kind", "there", "resumes"),
    [("train", "train", True), ("inherit", "inherit", True), ("train", "diagnose", False),
     ("diagnose", "train", False), ("evaluate", "evaluate", False), ("compare", "", False)],
)  # fmt: skip
def test_resuming_is_named_where_it_can_be_done(
    tmp_path: Path, kind: str, there: str, resumes: bool
) -> None:
    path = tmp_path / "run"
    if there:
        Run(path).make(there, {})
    else:
        path.write_text("a file")
    with pytest.raises(WakefulError, match="choose another folder") as caught:
        Run(path).refuse_existing(kind)
    assert ("--resume" in str(caught.value)) == resumes


def test_of_two_that_create_at_once_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run"
    slow = Run.create(path, "train", {"name": "slow"})
    slow.__enter__()
    # Another process has another number, and so another folder to fill.
    (tmp_path / "fast").mkdir()
    Run(tmp_path / "fast").write_json("run.json", {"format": 1, "name": "fast"})
    (tmp_path / "fast").rename(path)
    with pytest.raises(WakefulError, match="exists already"):
        slow.__exit__(None, None, None)
    assert Run.open(path).header.name == "fast"
    assert entries(tmp_path) == {"run"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "it has no run.json"),
        ("{", "is not JSON"),
        ("[1]", "holds no JSON object"),
        ("[" * 100_000, "is not JSON"),
        ('{"format": 2}', "run format 2; this wakeful reads 1"),
    ],
)
def test_what_is_no_run_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(WakefulError, match=message):
        Run.open(tmp_path)


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    with pytest.raises(WakefulError, match=r"summary\.json is missing; is the run finished"):
        run.read_json("summary.json")
    (run.path / "folder.json").mkdir()
    with pytest.raises(WakefulError, match=r"folder\.json cannot be read: Is a directory"):
        run.read_json("folder.json")
    Run(tmp_path / "c").make("compare", {})
    with pytest.raises(WakefulError, match=r"no trained model: run\.json calls it 'compare'"):
        _ = Run.open(tmp_path / "c").config
    with pytest.raises(WakefulError, match="not a run directory"):
        Run.open("x" * 5000)


ROWS = [{"kind": "train", "step": step, "loss": step / 3} for step in range(1, 6)]


def with_rows(path: Path) -> Run:
    run = made(path)
    for row in ROWS:
        run.append(row)
    return run


def test_a_last_line_cut_anywhere_is_left_out_and_mended(tmp_path: Path) -> None:
    run = with_rows(tmp_path / "run")
    file = run.path / "metrics.jsonl"
    whole = file.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    for end in range(last, len(whole) + 1):
        file.write_bytes(whole[:end])
        rows = ROWS if end >= len(whole) - 1 else ROWS[:-1]
        assert run.metrics() == rows
        run.drop_metrics_after(4, end=9)
        run.append(ROWS[4])
        assert run.metrics() == ROWS
        assert file.read_bytes() == whole


@pytest.mark.parametrize("line", [b"{", b"7", b'{"step": 1}', b"\xff\xfe", b"\0\0"])
def test_a_line_damaged_inside_is_named(tmp_path: Path, line: bytes) -> None:
    run = with_rows(tmp_path / "run")
    lines = (run.path / "metrics.jsonl").read_bytes().splitlines()
    lines[2] = line
    (run.path / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    with pytest.raises(WakefulError, match=r"metrics\.jsonl line 3 is not a metrics row"):
        run.metrics()


@pytest.mark.slow
@given(st.integers(0, 6), st.lists(st.sampled_from(["train", "validation"]), max_size=8))
def test_rows_past_a_step_are_dropped_and_no_others(last: int, kinds: list[str]) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        rows = [{"kind": kind, "step": number // 2} for number, kind in enumerate(kinds)]
        for row in rows:
            run.append(row)
        run.drop_metrics_after(last, end=9)
        assert run.metrics() == [row for row in rows if row["step"] <= last]
        run.drop_metrics_after(last, end=last)
        assert run.metrics() == [
            row
            for row in rows
            if row["step"] < last or (row["step"] == last and row["kind"] == "train")
        ]


def test_metrics_become_a_table(tmp_path: Path) -> None:
    run = with_rows(tmp_path / "run")
    run.append({"kind": "validation", "step": 5, "loss": 1, "standard_error": None})
    run.write_frame("metrics.parquet", run.logged())
    table = pl.read_parquet(run.path / "metrics.parquet")
    assert table.columns == ["kind", "step", "loss", "standard_error"]
    assert table["step"].to_list() == [1, 2, 3, 4, 5, 5]
    assert table["loss"][:5].to_list() == [row["loss"] for row in ROWS]


def test_a_number_that_json_lacks_is_never_written(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    with pytest.raises(ValueError, match="Out of range"):
        run.append({"kind": "train", "step": 1, "loss": float("nan")})
    assert run.metrics() == []


def test_a_frame_of_a_run_in_a_folder_called_tilde(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = made(Path("~") / "run")
    run.write_frame("mine.parquet", pl.DataFrame({"x": [1, 2]}))
    assert pl.read_parquet(tmp_path / "~/run/mine.parquet")["x"].to_list() == [1, 2]


def test_a_frame_of_a_run_whose_folder_was_removed(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    shutil.rmtree(run.path)
    with pytest.raises(WakefulError, match=r"mine\.parquet cannot be written: No such file"):
        run.write_frame("mine.parquet", pl.DataFrame({"x": [1, 2]}))


def test_one_at_a_time(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    with (
        run.lock(),
        pytest.raises(WakefulError, match="another process is working in"),
        Run.open(run.path).lock(),
    ):
        pytest.fail("two hold the lock")
    with run.lock():
        pass


def test_errors_inside_the_lock_keep_their_own_words(tmp_path: Path) -> None:
    run = made(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="elsewhere"), run.lock():
        raise FileNotFoundError(errno.ENOENT, "gone", "elsewhere")


WRITES: dict[str, Callable[[Run], None]] = {
    "text": lambda run: run.write_text("old", "x" * 50_000),
    "json": lambda run: run.write_json("old", {"x": "x" * 50_000}),
    "frame": lambda run: run.write_frame(
        "old", pl.DataFrame({"x": torch.rand(50_000, dtype=torch.float64).numpy()})
    ),
    "row": lambda run: run.append({"kind": "train", "step": 6, "x": "x" * 50_000}),
}


@pytest.mark.parametrize("write", WRITES)
def test_a_file_that_does_not_fit_changes_nothing(tmp_path: Path, write: str) -> None:
    run = with_rows(tmp_path / "run")
    run.write_text("old", "kept")
    before = entries(run.path)
    with pytest.raises(WakefulError, match="cannot be written: File too large"), largest_file(9000):
        WRITES[write](run)
    assert (run.path / "old").read_text() == "kept"
    assert entries(run.path) == before
    assert run.metrics() == ROWS


@pytest.mark.parametrize(
    ("number", "message"),
    [
        (errno.ENOSPC, "the disk is full: .*old could not be written and what was there is kept"),
        (errno.EDQUOT, "the disk is full"),
        (errno.EACCES, "old cannot be written: Permission denied"),
        (errno.EROFS, "old cannot be written: Read-only file system"),
        (errno.EIO, "old cannot be written: Input/output error"),
    ],
)
@pytest.mark.parametrize("how", ["python", "rust"])
def test_the_systems_errors_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, message: str, how: str
) -> None:
    run = made(tmp_path / "run")
    run.write_text("old", "kept")

    def fail(*_: object, **__: object) -> None:
        if how == "rust":
            raise pl.exceptions.ComputeError(f"underlying IO error: no (os error {number})")
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(pl.DataFrame, "write_parquet", fail)
    with pytest.raises(WakefulError, match=message) as caught:
        run.write_frame("old", pl.DataFrame())
    assert "\n" not in str(caught.value)
    assert (run.path / "old").read_text() == "kept"
    assert not list(run.path.glob(".*"))


def test_an_error_that_is_not_the_systems_is_a_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise pl.exceptions.ComputeError("a mistake of ours")

    monkeypatch.setattr(pl.DataFrame, "write_parquet", fail)
    with pytest.raises(pl.exceptions.ComputeError):
        made(tmp_path / "run").write_frame("x", pl.DataFrame())


def test_the_environment_names_versions_and_machine() -> None:
    found = environment(torch.device("cpu"))
    assert found.torch == torch.__version__
    assert found.threads == torch.get_num_threads()
    assert found.device_name
    assert from_table(Environment, to_table(found)) == found
