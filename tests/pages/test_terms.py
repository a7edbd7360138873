"""Every figure that a page shows is explained in a line."""

from pathlib import Path

import numpy as np
from markupsafe import escape

from wakeful.evaluation.report import evaluation_report
from wakeful.reports.html import write_page
from wakeful.reports.terms import TERMS, explain
from wakeful.scores import Score


def test_a_measure_has_its_metrics_line() -> None:
    assert explain("layers(metric='rank', part='late')") == TERMS["rank"]
    title = "over_layers(metric='entropy@0.5', variant='code', title='kurtosis')"
    assert explain(title) == TERMS["entropy"]
    assert explain("over_groups(figure='train_loss(last=50)')") == TERMS["train_loss"]
    assert explain("kurtosis_first") == TERMS["kurtosis"]
    assert explain("kurtosis_rest") == TERMS["kurtosis_rest"]
    assert explain("nothing of ours") == ""


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
    page = write_page(evaluation_report(scores), tmp_path / "e.html").read_text("utf-8")
    for term in ("perplexity", "bits_per_byte", "acc", "acc_norm", "prefill", "decode"):
        assert str(escape(TERMS[term])) in page
