"""What reports make of runs that are unfinished, damaged or odd."""

import io
import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from rich.console import Console

from pages.synthetic import inheritance
from pages.test_report import STEPS, make_comparison, make_run
from wakeful.errors import WakefulError
from wakeful.inheritance.report import inheritance_report
from wakeful.reports.charts import specification
from wakeful.reports.html import write_page
from wakeful.reports.terminal import render_terminal
from wakeful.reports.value import Facts
from wakeful.training.charts import difference_chart, relative_loss_chart
from wakeful.training.compared import ComparedRuns, read_comparison, read_run
from wakeful.training.report import caveat, comparison_headline, comparison_report, next_diagnosis
from wakeful.training.tables import (
    differing_fields,
    machines,
    relative_training_loss,
    summary_table,
)


def change_json(path: Path, change: dict[str, Any]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def interrupt(run: Path, steps: int) -> None:
    """Make a finished run one that was stopped after so many steps."""
    rows = pl.read_parquet(run / "metrics.parquet").head(steps).to_dicts()
    lines = [json.dumps(row) for row in rows]
    (run / "metrics.jsonl").write_text("\n".join([*lines, '{"kind": "train", "st']))
    data = json.loads((run / "summary.json").read_text())["data"]
    (run / "data.json").write_text(json.dumps(data))
    change_json(run / "run.json", {"status": "running"})
    for name in ("metrics.parquet", "summary.json", "validation.parquet"):
        (run / name).unlink()


def replace_losses(run: Path, losses: dict[int, float | None]) -> None:
    path = run / "metrics.parquet"
    rows = pl.read_parquet(path).to_dicts()
    changed = [row | {"loss": losses.get(row["step"], row["loss"])} for row in rows]
    pl.DataFrame(changed, schema_overrides={"loss": pl.Float64}).write_parquet(path)


def compared(path: Path, shifts: dict[str, float], seeds: list[int]) -> ComparedRuns:
    return read_comparison(make_comparison(path, shifts, seeds))


def test_colors_do_not_change_when_a_run_finishes(tmp_path: Path) -> None:
    folder = make_comparison(tmp_path / "c", {"a": 0.0, "b": 0.1, "d": 0.2}, [0])
    scales = []
    for _ in range(2):
        chart = difference_chart(read_comparison(folder))
        assert chart is not None
        scales.append(specification(chart)["layer"][2]["encoding"]["color"]["scale"])
        if len(scales) == 1:
            interrupt(folder / "b" / "seed-0", 3)
    assert scales[0] == scales[1]


def replace_in_config(run: Path, old: str, new: str) -> None:
    path = run / "config.toml"
    path.write_text(path.read_text().replace(old, new, 1))


def test_runs_of_one_name_and_different_configurations_are_not_seeds_of_it(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / str(seed), "x", seed=seed) for seed in range(3)]
    replace_in_config(runs[1], 'device = "auto"', 'device = "cpu"')
    assert read_comparison(runs).variants == ("x",)
    replace_in_config(runs[2], "lr = 0.001", "lr = 0.002")
    assert read_comparison(runs).variants == tuple(f"x ({run})" for run in runs)
    folder = make_comparison(tmp_path / "c", {"a": 0.0, "b": 0.1}, [0, 1])
    replace_in_config(folder / "b" / "seed-1", "lr = 0.001", "lr = 0.002")
    message = "b/seed-1 and .*b/seed-0 are not seeds of one variant: they differ in optimizer.lr"
    with pytest.raises(WakefulError, match=message):
        read_comparison(folder)


def test_the_method_says_whose_training_it_tells(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, name) for name in ("x", "y")]

    def method() -> dict[str, str]:
        report = comparison_report(read_comparison(runs, baseline="y"))
        facts = report.sections[-1].parts[0]
        assert isinstance(facts, Facts)
        return dict(facts.entries)

    replace_in_config(runs[1], "lr = 0.001", "lr = 0.002")
    assert "learning rate 0.002 after" in method()["Training of y"]


def test_windows_of_another_order_are_sorted_and_other_windows_refused(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "x", "x"), make_run(tmp_path / "y", "y", shift=0.2)]
    path = runs[1] / "validation.parquet"
    before = summary_table(read_comparison(runs))
    frame = pl.read_parquet(path)
    frame.reverse().write_parquet(path)
    assert summary_table(read_comparison(runs)).equals(before)
    frame.with_columns(pl.col("window") + 1).write_parquet(path)
    with pytest.raises(WakefulError, match="validation windows differ"):
        read_comparison(runs)


def test_a_loss_that_is_no_number_leaves_the_rest_of_the_curve(tmp_path: Path) -> None:
    folder = make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5}, [0])
    replace_losses(folder / "b" / "seed-0", {7: math.nan, 8: None, 9: math.inf})
    comparison = read_comparison(folder)
    smooth = relative_training_loss(comparison, 4)["difference"].to_numpy()
    assert smooth == pytest.approx(np.full(STEPS, -0.5))
    bare = relative_training_loss(comparison, 1)["difference"].to_numpy()
    assert np.flatnonzero(np.isnan(bare)).tolist() == [6, 7, 8]


def test_curves_are_paired_by_step(tmp_path: Path) -> None:
    folder = make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5}, [0])
    path = folder / "b" / "seed-0" / "metrics.parquet"
    pl.read_parquet(path)[5:].write_parquet(path)
    frame = relative_training_loss(read_comparison(folder), 1)
    assert frame["step"].to_list() == list(range(6, STEPS + 1))
    assert frame["difference"].to_numpy() == pytest.approx(np.full(STEPS - 5, -0.5))


def test_one_seed_has_no_band(tmp_path: Path) -> None:
    one = compared(tmp_path / "one", {"a": 0.0, "b": -0.5}, [0])
    assert relative_training_loss(one, 5)["low"].null_count() == STEPS
    for comparison, layers in (
        (one, 3), (compared(tmp_path / "two", {"a": 0.0, "b": -0.5}, [0, 1]), 4)
    ):  # fmt: skip
        chart = relative_loss_chart(comparison)
        assert chart is not None
        assert len(specification(chart)["layer"]) == layers


def test_nothing_that_is_no_number_reaches_a_chart(tmp_path: Path) -> None:
    folder = make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5, "d": 0.1}, [0, 1])
    shutil.rmtree(folder / "b" / "seed-0")
    shutil.rmtree(folder / "a" / "seed-1")
    comparison = read_comparison(folder)
    assert math.isnan(summary_table(comparison)["difference"].to_list()[1])
    for chart in (difference_chart(comparison), relative_loss_chart(comparison)):
        assert chart is not None
        json.dumps(specification(chart), allow_nan=False)


def test_the_summary_says_what_is_paired_and_gives_ratios(tmp_path: Path) -> None:
    folder = make_comparison(tmp_path / "c", {"a": 0.0, "b": -0.5}, [0])
    change_json(
        folder / "b" / "seed-0" / "summary.json",
        {"kv_cache_bytes_per_token": 256, "tokens_per_second": 1280.0},
    )
    table = summary_table(read_comparison(folder))
    assert table["paired_over"].to_list() == ["windows", "windows"]
    assert table["cache_ratio"].to_list() == [1.0, 0.5]
    assert table["speed_ratio"].to_list() == [1.0, 2.0]
    several = compared(tmp_path / "s", {"a": 0.0, "b": -0.5}, [0, 1])
    assert summary_table(several)["paired_over"].unique().to_list() == ["seeds"]


def test_what_differs_is_found(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "x", "x"), make_run(tmp_path / "y", "y")]
    comparison = read_comparison(runs)
    assert differing_fields(comparison) == []
    assert len(machines(comparison)) == 1
    config = runs[1] / "config.toml"
    text = config.read_text().replace("batch_size = 16", "batch_size = 8", 1)
    config.write_text(text.replace("lr = 0.001", "lr = 0.002", 1))
    change_json(runs[1] / "environment.json", {"threads": 4})
    comparison = read_comparison(runs)
    assert differing_fields(comparison) == [
        ("x", "optimizer.lr = 0.001; train.batch_size = 16"),
        ("y", "optimizer.lr = 0.002; train.batch_size = 8"),
    ]
    assert len(machines(comparison)) == 2


def test_runs_that_share_no_seed_are_not_called_alike(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "x", "x"), make_run(tmp_path / "y", "y", seed=1)]
    comparison = read_comparison(runs)
    assert (
        comparison_headline(comparison) == "Nothing is compared: no variant has a seed that x has."
    )
    assert caveat(comparison) == "No variant has a seed that x has: there are no differences."
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(render_terminal(comparison_report(comparison)))
    text = console.export_text()
    assert re.search(r"^y .* – ", text, re.MULTILINE)
    assert "not finite" not in text


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("summary.json", {"parameters": {}}, r"parameters\.total is missing"),
        ("summary.json", {"seconds": "long"}, "seconds must be a number, got 'long'"),
        ("summary.json", {"seconds": math.nan}, "is not JSON"),
        ("summary.json", {"tokens_per_second": True}, "tokens_per_second must be a number"),
        ("summary.json", {"data": 3}, "data must be a table"),
        ("environment.json", {"threads": "2"}, "threads must be a whole number"),
    ],
)  # fmt: skip
def test_a_field_that_is_missing_or_odd_is_named(
    tmp_path: Path, file: str, change: dict[str, Any], message: str
) -> None:
    run = make_run(tmp_path / "x", "x")
    change_json(run / file, change)
    with pytest.raises(WakefulError, match=message) as caught:
        read_run(run)
    assert file in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("frame", "message"),
    [
        (pl.DataFrame({"window": [0], "loss": [1.0]}), "no column 'tokens'"),
        (pl.DataFrame({"window": [0], "loss": ["x"], "tokens": [3]}), "other types"),
        (pl.DataFrame({"window": [0], "loss": [math.nan], "tokens": [3]}), "no finite loss"),
        (pl.DataFrame({"window": [0, 1], "loss": [1.0, None], "tokens": [3, 3]}), "no finite loss"),
        (pl.DataFrame({"window": [0], "loss": [1.0], "tokens": [0]}), "no tokens"),
        (pl.DataFrame({"window": [0, 0], "loss": [1.0, 1.0], "tokens": [1, 1]}), "twice"),
        (pl.DataFrame({"window": [], "loss": [], "tokens": []}), "no validation windows"),
    ],
)
def test_validation_windows_that_cannot_be_are_refused(
    tmp_path: Path, frame: pl.DataFrame, message: str
) -> None:
    run = make_run(tmp_path / "x", "x")
    frame.write_parquet(run / "validation.parquet")
    with pytest.raises(WakefulError, match=message) as caught:
        read_run(run)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seeds": 3}, "seeds must be a list, got 3"),
        ({"variants": [1]}, r"variants\[0\] must be a string"),
        ({"variants": ["../../etc"]}, "variants cannot hold"),
        ({"baseline": "z"}, "no finished run of its baseline 'z'"),
    ],
)
def test_a_comparison_that_cannot_be_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    folder = make_comparison(tmp_path / "c", {"a": 0.0}, [0])
    change_json(folder / "run.json", change)
    with pytest.raises(WakefulError, match=message):
        read_comparison(folder)


def test_machines_are_told_by_their_processes_and_threads(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "x", "x"), make_run(tmp_path / "y", "y")]
    change_json(runs[0] / "environment.json", {"threads": 1})
    change_json(runs[1] / "environment.json", {"threads": 1, "processes": 2})
    assert machines(read_comparison(runs)) == [
        "CPU, 1 thread; torch 2, Python 3, wakeful 0",
        "CPU, 2 processes of 1 thread; torch 2, Python 3, wakeful 0",
    ]


def test_an_inheritance_tells_its_machine_so_too(tmp_path: Path) -> None:
    folder = inheritance(tmp_path / "i")
    change_json(folder / "environment.json", {"device_name": "CPU", "threads": 1, "processes": 2})
    page = write_page(inheritance_report(folder), tmp_path / "page.html").read_text("utf-8")
    assert "<dd>CPU, 2 processes of 1 thread; torch" in page


def test_the_lowest_is_named_among_several_alone(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "x", "x"), make_run(tmp_path / "y", "y", seed=1, shift=-1.0)]
    # Losses of other seeds are not compared: nothing is lowest.
    for folders in (runs[:1], runs):
        assert next_diagnosis(read_comparison(folders)).text == "look inside x"
    runs.append(make_run(tmp_path / "z", "z", shift=-0.1))
    assert next_diagnosis(read_comparison(runs)).text == "look inside z, the lowest"


@pytest.mark.slow
def test_domains_that_a_run_did_not_measure_are_left_out(tmp_path: Path) -> None:
    folder = make_comparison(tmp_path / "c", {"a": 0.0, "b": 0.1}, [0])
    for name, shown in (("a", False), ("b", True)):
        file = folder / name / "seed-0" / "summary.json"
        told = json.loads(file.read_text())["validation"]
        change_json(file, {"validation": told | {"domains": {"prose": 3.0, "code": 2.0}}})
        page = write_page(
            comparison_report(read_comparison(folder), title="t"), tmp_path / "r.html"
        ).read_text()
        assert ("Loss by domain" in page) == shown
