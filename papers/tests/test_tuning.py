"""Learning rates chosen by one rule: which multiples are tried, and what is trained then."""

import json
import math
from pathlib import Path

import pytest

from wakeful.errors import WakefulError
from wakeful_papers import reproduce
from wakeful_papers.exhibits.exhibit import read_exhibit
from wakeful_papers.exhibits.plan import plan_exhibit
from wakeful_papers.exhibits.tuning import Tuning, best_rate, multiply_rates
from wakeful_papers.verbs import runs as exhibit_runs
from wakeful_papers.verbs.tuning import apply_tuned_rates

RULE = Tuning(multiples=(0.5, 1.0, 2.0), beyond=2)


def test_the_grid_is_tried_and_goes_on_where_the_best_is_at_its_edge() -> None:
    assert RULE.remaining_multiples({}) == (0.5, 1.0, 2.0)
    assert RULE.remaining_multiples({1.0: 3.0}) == (0.5, 2.0)
    assert RULE.remaining_multiples({0.5: 3.0, 1.0: 2.0, 2.0: 2.5}) == ()
    falling = {0.5: 3.0, 1.0: 2.0, 2.0: 1.0}
    assert RULE.remaining_multiples(falling) == (4.0,)
    assert RULE.remaining_multiples(falling | {4.0: 0.9}) == (8.0,)
    assert RULE.remaining_multiples(falling | {4.0: 1.5}) == ()
    assert RULE.remaining_multiples(falling | {4.0: 0.9, 8.0: 0.8}) == ()  # twice beyond is enough
    assert RULE.remaining_multiples({0.5: 1.0, 1.0: 2.0, 2.0: math.inf}) == (0.25,)
    assert best_rate(falling | {4.0: 0.9, 8.0: math.inf}) == 4.0
    assert best_rate({0.5: 1.0, 1.0: 1.0}) == 0.5


def test_a_trial_is_a_share_of_a_row_and_its_schedule_keeps_its_form() -> None:
    job = plan_exhibit(read_exhibit("headline/sinks"), "small").jobs[0]
    config = Tuning(steps=0.25).trial_config(job.config, 2.0)
    assert config.train.steps == 1200
    assert config.optimizer.lr == 2 * job.config.optimizer.lr
    assert config.optimizer.final_lr == 2 * job.config.optimizer.final_lr
    assert config.optimizer.warmup_steps == 100
    assert config.train.diagnose.every == 0
    assert config.model == job.config.model
    assert multiply_rates(job.config, 1.0) == job.config


def test_every_row_is_trained_at_its_best_rate_and_trials_are_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text(f"{number} is a number, and so is {number**2}. " * 80)
    real, trained = exhibit_runs.train_run, []

    def train(config, path, **options):
        trained.append((config.name, config.train.seed, config.optimizer.lr))
        if len(trained) == 7:
            raise KeyboardInterrupt
        return real(config, path, **options)

    monkeypatch.setattr(exhibit_runs, "train_run", train)
    asked = {"scale": "small", "steps": 8, "seeds": [0, 1], "text": str(text),
             "out": str(tmp_path / "out"), "runs": str(tmp_path / "runs")}  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        reproduce("headline/sinks", **asked)
    assert reproduce("headline/sinks", **asked).path == tmp_path / "out"
    trials = [each for each in trained if each[1] == Tuning().seed]
    assert len(trials) == len(set(trials)) + 1  # the one that was interrupted
    tuned = json.loads((tmp_path / "out" / "tuned.json").read_text())
    assert set(tuned) == {"vanilla", "softmax1", "orthoadam", "softmax1-orthoadam"}
    for row, losses in tuned.items():
        assert 5 <= len(losses) <= 7
        best = min(losses, key=lambda rate: losses[rate])
        rates = {rate for name, seed, rate in trained if name == row and seed in (0, 1)}
        assert sorted(rates) == [pytest.approx(float(best))]
    count = len(trained)
    reproduce("headline/sinks", **asked)
    assert len(trained) == count
    asked |= {"tuned": str(tmp_path / "out" / "tuned.json"), "out": str(tmp_path / "again")}
    reproduce("headline/sinks", **asked)
    assert len(trained) == count  # at the same rates, whose runs are there, without a trial
    reproduce("headline/sinks", **asked | {"runs": str(tmp_path / "elsewhere"), "seeds": [0],
                                           "out": str(tmp_path / "third")})  # fmt: skip
    assert len(trained) == count + 4


def test_rates_come_from_a_file_of_an_exhibit_that_tunes_and_has_all_rows(tmp_path: Path) -> None:
    path = tmp_path / "tuned.json"
    losses = {"0.003": 2.5, "0.006": 2.4, "0.012": None}
    path.write_text(json.dumps({"vanilla": losses}))
    plan = plan_exhibit(read_exhibit("headline/sinks"), "small")
    with pytest.raises(WakefulError, match=r"tuned\.json is not of headline/sinks: its rows"):
        apply_tuned_rates(plan, path)
    for wrong in ({"0.003": None}, {}, {"fast": 2.0}):
        path.write_text(json.dumps({job.row: wrong for job in plan.jobs}))
        with pytest.raises(WakefulError, match="no learning rate at which vanilla was trained"):
            apply_tuned_rates(plan, path)
    path.write_text(json.dumps({job.row: losses for job in plan.jobs}))
    found = apply_tuned_rates(plan, path)
    assert [job.config.optimizer.lr for job in found.jobs] == pytest.approx([0.006] * 4)
    assert found.tuning is None
    with pytest.raises(WakefulError, match="headline/outliers tunes no learning rates"):
        apply_tuned_rates(plan_exhibit(read_exhibit("headline/outliers"), "small"), path)
    path.write_text("[]")
    with pytest.raises(WakefulError, match=r"tuned\.json"):
        apply_tuned_rates(plan, path)
