"""A comparison as one offline HTML page."""

from pathlib import Path

from wakeful.config.schema import config_to_toml
from wakeful.pages.comparison.charts import (
    cost_charts,
    difference_chart,
    relative_loss_chart,
    training_loss_chart,
)
from wakeful.pages.comparison.differences import differing_fields, machines, same_batches
from wakeful.pages.comparison.paper_table import counting_the_embedding, paper_tables
from wakeful.pages.comparison.tables import Comparison, summary_table
from wakeful.pages.comparison.verdict import caveat, errors_over, seeds_missing, verdicts
from wakeful.pages.page import write_page


def write_report(comparison: Comparison, path: str | Path, *, title: str) -> Path:
    """Write the page about a comparison; an old page stays until the new one is whole."""
    window = smoothing_window(comparison)
    charts = {
        "relative": relative_loss_chart(comparison, window),
        "difference": difference_chart(comparison),
        "training": training_loss_chart(comparison, window),
    }
    first = comparison.runs[0]
    return write_page(
        path,
        "comparison",
        title=title,
        comparison=comparison,
        verdicts=verdicts(comparison),
        caveat=caveat(comparison),
        seeds_missing=seeds_missing(comparison),
        errors_over=errors_over(comparison),
        rows=list(summary_table(comparison).iter_rows(named=True)),
        charts=charts,
        papers=paper_tables(comparison),
        older=counting_the_embedding(comparison),
        costs=cost_charts(comparison),
        window=window,
        first=first,
        differing=differing_fields(comparison),
        same_batches=same_batches(comparison),
        machines=machines(comparison),
        configs={v: config_to_toml(comparison.of(v)[0].config) for v in comparison.variants},
        samples={v: comparison.of(v)[0].summary["samples"] for v in comparison.variants},
    )


def smoothing_window(comparison: Comparison) -> int:
    """Return the steps to smooth over: the paper's 100, or a tenth of a shorter run."""
    steps = min(run.config.train.steps for run in comparison.runs)
    return max(1, min(100, steps // 10))
