"""The jobs for a GPU: their plan, and all of them with a thousandth of the tokens on the CPU."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from wakeful.errors import WakefulError
from wakeful.runs.run import Run, is_done

TOOL = Path(__file__).resolve().parent.parent / "tools" / "on_gpu.py"


def load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("on_gpu", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = sys.modules["on_gpu"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


on_gpu = load_tool()


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A packed text, unpacked: 20 files of words."""
    folder = tmp_path_factory.mktemp("text")
    for number in range(20):
        words = " ".join(f"word{(number * 37 + n * n) % 211}" for n in range(2_000))
        (folder / f"{number}.txt").write_text(words)
    archive = folder / "text.tar.xz"
    size = on_gpu.pack([f"{folder}/*.txt"], archive, vocabulary=300)
    assert size == archive.stat().st_size < on_gpu.MOST_BYTES
    on_gpu.unpack(archive, folder / "unpacked")
    ids = (folder / "text.tar.prepared" / "train.tokens").read_bytes()
    assert (folder / "unpacked" / "train.tokens").read_bytes() == ids
    return str(folder / "unpacked")


@pytest.mark.parametrize("name", on_gpu.JOBS)
def test_a_job_ends_within_nine_minutes(name: str) -> None:
    job = on_gpu.JOBS[name]
    assert 60 < on_gpu.seconds_of(job) < on_gpu.SECONDS
    for row in job.rows:
        config = on_gpu.config_of(job, row, 3, "text", rate=0.0, smoke=False)
        train = config.train
        tokens = train.steps * train.batch_size * train.length
        assert tokens == pytest.approx(job.tokens, rel=1e-3)
        assert train.batch_size * train.length == on_gpu.TOKENS_PER_STEP
        assert (train.seed, train.device, train.dtype) == (3, "cuda", "bfloat16")
        looked = train.diagnose.every / train.steps * job.tokens
        assert looked == pytest.approx(on_gpu.OUTLIERS_AT, rel=2e-3)


def test_rows_are_those_of_the_exhibit() -> None:
    of = {
        row: on_gpu.config_of(on_gpu.JOBS[name], row, 0, "text", rate=0.0, smoke=False)
        for name in ("values", "dense", "cache", "sources")
        for row in on_gpu.JOBS[name].rows
    }
    assert of["vanilla"].model.route == "own"
    assert of["resformer"].model.route == "resformer"
    assert of["gqa"].model.num_kv_heads == 4
    assert of["denseformer"].model.depth == "denseformer"
    assert all(config.data.bos for config in of.values())
    shapes = {(c.model.num_layers, c.model.width, c.model.mlp_width) for c in of.values()}
    assert shapes == {(8, 512, 1792)}
    table2 = on_gpu.JOBS["outliers"]
    cured = on_gpu.config_of(table2, "cured", 0, "text", rate=3e-3, smoke=False)
    assert (cured.model.norm, cured.model.normalizer) == ("rmsnorm_single", "softmax1")
    assert (cured.optimizer.name, cured.optimizer.rotation) == ("orthoadam", "haar")
    assert (cured.optimizer.lr, cured.model.num_layers, cured.model.width) == (3e-3, 12, 512)


def test_a_text_that_is_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_gpu, "MOST_BYTES", 1000)
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"{number} " * 500)
    with pytest.raises(WakefulError, match="MiB"):
        on_gpu.pack([f"{tmp_path}/*.txt"], tmp_path / "text.tar.xz", vocabulary=300)
    assert not (tmp_path / "text.tar.xz").exists()


def test_differences_are_paired_over_seeds_at_one_rate() -> None:
    rows = [
        {"row": f"{row}-{rate}", "seed": seed, "loss": loss + seed}
        for row, rate, loss in (("vanilla", "0.001", 9.0), ("vanilla", "0.003", 3.0),
                                ("cured", "0.003", 2.5))
        for seed in (0, 1)
    ]  # fmt: skip
    [line] = on_gpu.differences(rows)
    assert line.startswith("cured-0.003 against vanilla-0.003, loss: −0.5")
    assert "2 seeds" in line


@pytest.mark.slow
def test_a_job_that_runs_out_of_time_goes_on(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tokens that it trains on are the plan's; a later seed is added; vanilla is the pair."""
    on_gpu.run_job("values", text, tmp_path, seeds=[0], smoke=True, seconds=2.0)
    assert "time is up" in capsys.readouterr().out
    rows = on_gpu.run_job("values", text, tmp_path, seeds=[0], smoke=True)
    assert [(row["row"], row["seed"]) for row in rows] == [("resformer", 0), ("vanilla", 0)]
    for row in rows:
        assert row["tokens"] == pytest.approx(on_gpu.JOBS["values"].tokens * on_gpu.SMOKE, rel=0.01)
    rows = on_gpu.run_job("cache", text, tmp_path, seeds=[0], smoke=True)
    assert {row["row"] for row in rows} == {"vanilla", "svformer", "gqa"}
    assert json.loads((tmp_path / "figures" / "cache.json").read_text()) == rows
    assert any("svformer against vanilla, loss" in line for line in on_gpu.differences(rows))


@pytest.mark.slow
def test_without_outliers_the_rate_of_table_2_is_raised_once(text: str, tmp_path: Path) -> None:
    rows = on_gpu.run_job("outliers-seeds", text, tmp_path, seeds=[1], smoke=True)
    assert {row["lr"] for row in rows} == {on_gpu.RATES[1]}
    first = tmp_path / "runs" / "outliers" / "vanilla-0.001" / "seed-0"
    assert not is_done(first)
    assert Run(first).header.status != "done"
    decision = json.loads((tmp_path / "runs" / "outliers" / "rate.json").read_text())
    assert decision["kurtosis_first"] < on_gpu.OUTLIERS


@pytest.mark.slow
def test_heirs_are_compared_with_their_reference(text: str, tmp_path: Path) -> None:
    rows = on_gpu.run_job("heirs", text, tmp_path, seeds=[0], smoke=True)
    assert {row["row"] for row in rows} >= {"reference", "heirs: random"}
    lines = on_gpu.differences(rows)
    assert sum(line.startswith("heirs: ") for line in lines) >= 2


def test_a_fresh_process_plans_all_jobs() -> None:
    printed = subprocess.run(
        [sys.executable, TOOL, "plan"], check=True, capture_output=True, text=True
    )
    assert all(name in printed.stdout for name in on_gpu.JOBS)
