"""The preset `patient` at a tenth of its steps: the disease grows, and a cure that works holds."""

from pathlib import Path

import polars as pl
import pytest

from wakeful.config.schema import Config, config_from_table, seeds_of, variants_of
from wakeful.config.tables import merged, read_table
from wakeful.runs.run import Run
from wakeful.training.loop import train
from wakeful_papers.exhibits.exhibit import SCALES, exhibit
from wakeful_papers.exhibits.plan import plan_of

TABLE = read_table("patient")
SHORT = {"train": {"steps": 120, "eval_every": 0, "diagnose": {"every": 40}, "device": "cpu"}}


def variant(name: str) -> Config:
    return config_from_table(merged(variants_of("patient", TABLE)[name], SHORT))


def masses(run: Run, position: str) -> dict[int, float]:
    """Return the head's attention on BOS by step."""
    rows = run.trajectories().filter(
        pl.col("metric") == "bos_mass", pl.col("position") == position, pl.col("head") == 0
    )
    return dict(rows.select("step", "value").iter_rows())


@pytest.mark.usefixtures("as_users_run_it")  # checks of shapes are a third of so many small steps
def test_the_patient_falls_ill_and_cures_keep_it_well(tmp_path: Path) -> None:
    names = ("vanilla", "relu", "large-sink")
    ill, *cured = (train(variant(name), tmp_path / name) for name in names)
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


def test_every_patient_has_three_seeds_and_follows_its_heads() -> None:
    for name in ("patient", "patient-rotary", "patient-deep"):
        table = read_table(name)
        assert seeds_of(table) == [0, 1, 2]
        configs = {key: config_from_table(entry) for key, entry in variants_of(name, table).items()}
        assert all(config.train.diagnose.heads for config in configs.values())
        layers = {config.model.num_layers for config in configs.values()}
        assert layers == {3 if name == "patient-deep" else 1}
        # A value from the first layer is the layer's own where there is one layer.
        assert ("resformer" in configs) == (name == "patient-deep")
    assert configs["all"].optimizer.name == "orthoadam"
    assert pytest.approx(3e-3) == configs["vanilla"].optimizer.lr


def test_the_papers_claims_tell_a_sink_from_uniform_attention() -> None:
    """That is 1/n of a query that sees n keys; of row 0, which sees BOS alone, nothing is asked."""
    found = exhibit("active-dormant/backcopy")
    levels = {claim.figure: (claim.direction, claim.than_value)
              for claim in found.claims if claim.row == "vanilla"}  # fmt: skip
    assert set(levels) == {"bos_mass_other", "bos_mass_trigger"}
    (grown, dormant), (faded, active) = levels["bos_mass_other"], levels["bos_mass_trigger"]
    assert (grown, faded) == ("higher", "lower")
    assert dormant is not None
    assert active is not None
    for scale in SCALES:
        length = plan_of(found, scale).config.train.length
        uniform = sum(1 / keys for keys in range(2, length + 1)) / (length - 1)
        assert 2 * active < uniform < dormant / 3


@pytest.mark.parametrize("name", ["backcopy", "backcopy-deep"])
def test_the_papers_scale_has_the_optimizers_of_the_authors_scripts(name: str) -> None:
    jobs = plan_of(exhibit(f"active-dormant/{name}"), "paper").jobs
    rows = {job.row: job.config.optimizer for job in jobs}
    adam, sgd = rows["vanilla"], rows["sgd"]
    assert (adam.lr, adam.beta1, adam.beta2, adam.weight_decay) == (3e-4, 0.9, 0.99, 1e-4)
    # Momentum is beta1.
    assert (sgd.name, sgd.lr, sgd.beta1, sgd.weight_decay) == ("sgd_momentum", 0.03, 0.9, 1e-4)
    assert all(each.final_lr == each.lr for each in rows.values())
