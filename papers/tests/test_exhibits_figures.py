"""Figures and curves of finished runs, of heirs and of mixtures."""

from pathlib import Path

import numpy as np
import pytest

from inheritance.references import reference, text, trained
from inheritance.test_heirs_recipe import (
    IMPOSSIBLE,
    carry_out,
    quietly,
    recipe_for,
    reference_model,
)
from training.test_mixture import mixture
from wakeful.inheritance.outcome import Arm
from wakeful.loading.model import Model
from wakeful.runs.run import Run
from wakeful.training.compared import read_run
from wakeful.training.loop import train_run
from wakeful.training.tables import training_rows
from wakeful_papers.exhibits.figures import measure_arm, measure_run, train_curve

__all__ = ["reference", "reference_model", "text", "trained"]


def test_a_mixtures_loss_is_seen_by_domain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    run = read_run(train_run(mixture(tmp_path), tmp_path / "run").path, "r")
    domains = run.summary.validation.domains
    assert domains is not None
    figures = measure_run(run).figures
    assert figures["loss_words"] == domains["words"]
    assert figures["loss"] == run.summary.validation.loss


def test_the_curve_of_stages_goes_on_from_one_to_the_next(
    reference: Run, text: Path, reference_model: Model, tmp_path: Path
) -> None:
    recipe = recipe_for(reference, text, grow=1, rounds=2)
    outcome = carry_out(
        recipe, reference_model.decoder(), loss=IMPOSSIBLE, out=tmp_path, display=quietly
    )
    runs = [read_run(each.run.path) for each in outcome.rounds]
    steps, losses = train_curve(runs)
    assert steps.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert losses[4] == training_rows(runs[1])["loss"][0]


def test_an_arm_is_seen_with_the_tokens_of_earlier_rounds() -> None:
    arm = Arm(
        arm="heir-4", heir=True, summary="", runs=(), depth=4, layers=(0, 1, 2, 3), steps=4,
        tokens=10, seconds=1.0, all_steps=12, all_tokens=30, parameters=7, cache_bytes_per_token=8,
        loss=3.0, standard_error=0.1, start_loss=4.0, minus_heir=0.0, minus_heir_error=None,
        minus_reference=0.0, minus_reference_error=0.1, parity=False, curve=(),
    )  # fmt: skip
    figures = measure_arm(arm, (np.zeros(0), np.zeros(0))).figures
    assert (figures["tokens"], figures["all_tokens"]) == (10, 30)
