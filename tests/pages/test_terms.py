"""Every figure that a page shows is explained in a line."""

from pathlib import Path

import numpy as np
import pytest
from markupsafe import escape

from wakeful.evaluation.scores import Score
from wakeful.reports.evaluation import evaluation_report
from wakeful.reports.html import write
from wakeful.reports.terms import TERMS, explained
from wakeful_papers.exhibits.exhibit import exhibit, exhibit_names

PLAIN = {"losses", "steps_per_second", "training_megabytes", "parameters"}
"""Everyday words that need no line."""


def test_a_measure_has_its_metrics_line() -> None:
    assert explained("layers(metric='rank', part='late')") == TERMS["rank"]
    title = "over_layers(metric='entropy@0.5', variant='code', title='kurtosis')"
    assert explained(title) == TERMS["entropy"]
    assert explained("over_groups(figure='train_loss(last=50)')") == TERMS["train_loss"]
    assert explained("kurtosis_first") == TERMS["kurtosis"]
    assert explained("kurtosis_rest") == TERMS["kurtosis_rest"]
    assert explained("nothing of ours") == ""


@pytest.mark.parametrize("name", exhibit_names())
def test_every_figure_and_drawing_of_an_exhibit_is_explained(name: str) -> None:
    shown = exhibit(name)
    said = {*shown.draw, *(column.figure for column in shown.table.columns)}
    without = {each for each in said if not explained(each)}
    assert {each for each in without if not any(word in each for word in PLAIN)} == set()


@pytest.mark.parametrize("name", exhibit_names())
def test_every_column_of_a_layout_is_explained(name: str) -> None:
    without = {each.figure for each in exhibit(name).table.columns if not explained(each.figure)}
    assert without <= PLAIN


def test_an_evaluations_measures_are_explained_on_its_page(tmp_path: Path) -> None:
    metrics = {
        "text": ("perplexity", "bits per byte"),
        "piqa": ("acc", "acc_norm (strict-match)"),
        "speed": ("prefill of 1,024, tokens/s", "decode after 128, tokens/s"),
    }
    scores = [
        Score(model="m", task=task, metric=metric, keys=("a", "b"), values=np.ones(2),
              weights=np.ones(2))
        for task, found in metrics.items()
        for metric in found
    ]  # fmt: skip
    page = write(evaluation_report(scores), tmp_path / "e.html").read_text("utf-8")
    for term in ("perplexity", "bits_per_byte", "acc", "acc_norm", "prefill", "decode"):
        assert str(escape(TERMS[term])) in page
