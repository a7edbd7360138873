"""The preset `patient` at a tenth of its steps: the disease grows, and a cure that works holds."""

from pathlib import Path

import polars as pl
import pytest

from wakeful.config.schema import Config, config_from_table, split_variants
from wakeful.config.tables import merge_tables, read_table
from wakeful.runs.run import Run
from wakeful.training.loop import train_run

TABLE = read_table("patient")
SHORT = {"train": {"steps": 120, "eval_every": 0, "diagnose": {"every": 40}, "device": "cpu"}}


def variant(name: str) -> Config:
    return config_from_table(merge_tables(split_variants("patient", TABLE)[name], SHORT))


def masses(run: Run, position: str) -> dict[int, float]:
    """Return the head's attention on BOS by step."""
    rows = run.trajectories().filter(
        pl.col("metric") == "bos_mass", pl.col("position") == position, pl.col("head") == 0
    )
    return dict(rows.select("step", "value").iter_rows())


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run_it")  # checks of shapes are a third of so many small steps
def test_the_patient_falls_ill_and_cures_keep_it_well(tmp_path: Path) -> None:
    names = ("vanilla", "relu", "large-sink")
    ill, *cured = (train_run(variant(name), tmp_path / name) for name in names)
    dormant, active = masses(ill, "other"), masses(ill, "trigger")
    assert list(dormant) == [0, 40, 80, 120]
    assert dormant[0] < 0.05
    assert dormant[120] > 0.2  # 0.52 in the end, the mean of three seeds
    assert active[120] < 0.01  # where it copies, the head has no need of BOS
    drain = ill.read_json("summary.json")["diagnosis"]["value_drain"]
    assert drain < 0.8
    for well in cured:
        assert max([*masses(well, "other").values()]) < 0.05
        assert well.read_json("summary.json")["diagnosis"]["value_drain"] > drain
    # All have begun to copy: who knows the pairs alone loses 0.65 nats more than the task.
    for run in (ill, *cured):
        summary = run.read_json("summary.json")
        assert summary["validation"]["excess_loss"] < 0.55
