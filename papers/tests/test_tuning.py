"""Learning rates chosen by one rule: which multiples are tried, and what is trained then."""

import json
import math
from pathlib import Path

import pytest

from wakeful_papers import reproduce
from wakeful_papers.exhibits.exhibit import exhibit
from wakeful_papers.exhibits.plan import plan_of
from wakeful_papers.exhibits.tuning import Tuning, at_rate, best_rate
from wakeful_papers.verbs import runs as exhibit_runs

RULE = Tuning(multiples=(0.5, 1.0, 2.0), beyond=2)


def test_the_grid_is_tried_and_goes_on_where_the_best_is_at_its_edge() -> None:
    assert RULE.left({}) == (0.5, 1.0, 2.0)
    assert RULE.left({1.0: 3.0}) == (0.5, 2.0)
    assert RULE.left({0.5: 3.0, 1.0: 2.0, 2.0: 2.5}) == ()
    falling = {0.5: 3.0, 1.0: 2.0, 2.0: 1.0}
    assert RULE.left(falling) == (4.0,)
    assert RULE.left(falling | {4.0: 0.9}) == (8.0,)
    assert RULE.left(falling | {4.0: 1.5}) == ()
    assert RULE.left(falling | {4.0: 0.9, 8.0: 0.8}) == ()  # twice beyond is enough
    assert RULE.left({0.5: 1.0, 1.0: 2.0, 2.0: math.inf}) == (0.25,)
    assert best_rate(falling | {4.0: 0.9, 8.0: math.inf}) == 4.0
    assert best_rate({0.5: 1.0, 1.0: 1.0}) == 0.5


def test_a_trial_is_a_share_of_a_row_and_its_schedule_keeps_its_form() -> None:
    job = plan_of(exhibit("headline/sinks"), "small").jobs[0]
    config = Tuning(steps=0.25).trial(job.config, 2.0)
    assert config.train.steps == 1200
    assert config.optimizer.lr == 2 * job.config.optimizer.lr
    assert config.optimizer.final_lr == 2 * job.config.optimizer.final_lr
    assert config.optimizer.warmup_steps == 100
    assert config.train.diagnose.every == 0
    assert config.model == job.config.model
    assert at_rate(job.config, 1.0) == job.config


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
