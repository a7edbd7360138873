"""Pages of exhibits with invented figures: enough for a page, without a model."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from wakeful.reports.html import write_page
from wakeful_papers.exhibits.derived import Results
from wakeful_papers.exhibits.exhibit import read_exhibit
from wakeful_papers.exhibits.figures import Measurement
from wakeful_papers.exhibits.judge import judge_claims
from wakeful_papers.exhibits.plan import plan_exhibit
from wakeful_papers.reports.reproduction import RunFacts, exhibit_report


def reproduction(
    path: Path, name: str = "value-residual/fig6", figures: Sequence[str] = ()
) -> Path:
    """Write the page of an exhibit whose rows reach random losses and other figures."""
    plan = plan_exhibit(read_exhibit(name), "tiny")
    random = np.random.default_rng(0)
    steps = np.arange(1.0, 5.0)
    losses = {
        (job.group, job.row, seed): random.uniform(3, 4) for job in plan.jobs for seed in (0, 1)
    }
    seen = {
        key: Measurement(
            {"loss": loss, "seconds": 1.0} | {figure: random.uniform(2, 4) for figure in figures},
            {"train_loss": (steps, loss / steps)},
        )
        for key, loss in losses.items()
    }
    places = {key: group.at for key, group in plan.exhibit.groups.items() if group.at is not None}
    results = Results(plan.exhibit.table.baseline, places, seen)
    facts = RunFacts("a text", "9 tokens", "a machine", "float32")
    judged = judge_claims(plan.exhibit, results, plan.scale, plan.tasks)
    return write_page(exhibit_report(plan, results, judged, facts), path)
