"""A comparison as one offline HTML page."""

import itertools
import json
from pathlib import Path
from typing import Any

import jinja2
import vl_convert
from markupsafe import Markup

from wakeful.config import config_to_toml
from wakeful.report.charts import (
    Drawing,
    cost_chart,
    difference_chart,
    relative_loss_chart,
    specification,
    theme,
    training_loss_chart,
)
from wakeful.report.tables import Comparison, summary_table
from wakeful.report.verdict import caveat, verdicts
from wakeful.run import replaced
from wakeful.statistics import with_error


def write_report(comparison: Comparison, path: str | Path, *, title: str) -> Path:
    """Write the page about a comparison; an old page stays until the new one is whole."""
    window = smoothing_window(comparison)
    charts = {
        "relative": relative_loss_chart(comparison, window),
        "difference": difference_chart(comparison),
        "cost": cost_chart(comparison),
        "training": training_loss_chart(comparison, window),
    }
    first = comparison.runs[0]
    html = render(
        "report.html.j2",
        title=title,
        comparison=comparison,
        verdicts=verdicts(comparison),
        caveat=caveat(comparison),
        rows=list(summary_table(comparison).iter_rows(named=True)),
        charts=charts,
        window=window,
        first=first,
        configs={v: config_to_toml(comparison.of(v)[0].config) for v in comparison.variants},
        samples={v: comparison.of(v)[0].summary["samples"] for v in comparison.variants},
    )
    path = Path(path)
    with replaced(path) as temporary:
        temporary.write_text(html, "utf-8")
    return path


def render(template: str, **values: Any) -> str:
    """Fill one of the package's templates; every value is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("wakeful.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["spec"] = _spec
    environment.filters["with_error"] = with_error
    environment.globals["next_id"] = itertools.count(1).__next__
    return environment.get_template(template).render(
        vega=Markup(_vega().replace("</script", "<\\/script")),
        themes=_json({"light": theme(), "dark": theme(dark=True)}),
        **values,
    )


def smoothing_window(comparison: Comparison) -> int:
    """Return the steps to smooth over: the paper's 100, or a tenth of a shorter run."""
    steps = min(run.config.train.steps for run in comparison.runs)
    return max(1, min(100, steps // 10))


def _vega() -> str:
    # Its type stub forgets that the snippet may be left out.
    return vl_convert.javascript_bundle()  # pyright: ignore[reportCallIssue]


def _spec(chart: Drawing) -> Markup:
    return _json(specification(chart))


def _json(value: Any) -> Markup:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(value)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
