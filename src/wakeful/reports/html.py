"""One offline HTML page out of a template: every kind of page is filled in and written here."""

import base64
import contextlib
import hashlib
import itertools
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2
import vl_convert
from markupsafe import Markup

from wakeful.errors import WakefulError
from wakeful.paths import default_cache_dir
from wakeful.reports import charts
from wakeful.reports.value import Report
from wakeful.runs.run import replace_atomically

_TEMPLATES = Path(__file__).parent / "templates"
_NOTEBOOK = 480
"""Pixels of a chart's width in a notebook."""


@charts.unchecked
def write_page(report: Report, path: str | Path, figures: Sequence[str] = ()) -> Path:
    """Write a report as one page that needs no network, and return its path; it replaces an old
    page atomically.

    With `figures` the charts are also written in these formats, to the folder "figures" beside it.

    Every value is escaped. In addition the page's Content-Security-Policy allows no scripts but our
    two, by their hashes: a browser would refuse a script in a value.
    """
    scripts = [_script(vega_bundle()), _script((_TEMPLATES / "page.js").read_text("utf-8"))]
    template = _template_environment().get_template("report.html.j2")
    html = template.render(
        report=report,
        scripts=scripts,
        hashes=" ".join(_hash(script) for script in scripts),
        themes={"light": charts.theme(), "dark": charts.theme(dark=True)},
    )
    path = Path(path)
    with replace_atomically(path) as temporary:
        temporary.write_text(html, "utf-8")
    if figures:  # drawing all charts takes seconds
        charts.save_figures(report.charts(), path.parent / "figures", figures)
    return path


def notebook_html(report: Report) -> str:
    """Return a report for a notebook: its headlines, short sections and first chart, as HTML
    without scripts or links.
    """
    template = _template_environment().get_template("notebook.html.j2")
    return template.render(report=report, chart=report.picture)


def _template_environment() -> jinja2.Environment:
    """Return jinja2's environment with the filters that the templates use."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters |= {
        "spec": charts.specification, "drawable": charts.drawable, "packed": _pack_columns,
        "picture": _picture, "slug": charts.slug, "looks": _looks,
        "kind": lambda part: type(part).__name__,
    }  # fmt: skip
    environment.policies["json.dumps_kwargs"] = {"allow_nan": False, "separators": (",", ":")}
    environment.globals["next_id"] = itertools.count(1).__next__  # for the ids of elements
    return environment


def _picture(spec: dict[str, Any]) -> Markup:
    """Return a chart as the address of an image that holds it."""
    png = vl_convert.vegalite_to_png(charts.standalone_spec(spec, _NOTEBOOK), scale=2)
    return Markup(f"data:image/png;base64,{base64.b64encode(png).decode()}")


def _looks(names: Sequence[str]) -> list[tuple[str, str, list[int], str]]:
    """Return (name, color, dash, shape) for each name, as charts draw it."""
    return [
        *zip(names, charts.colors(names), charts.dashes(names), charts.shapes(names), strict=True)
    ]


def _script(text: str) -> Markup:
    return Markup(text.replace("</script", "<\\/script"))


def _hash(script: str) -> str:
    """Return a script's name in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _pack_columns(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a specification with its data by column, which is a third of the size; page.js unpacks
    it.

    Its "usermeta" gets the options of the legends that page.js adds to a picture that a reader
    saves.
    """
    tables = {name: _pack_rows(rows) for name, rows in spec.get("datasets", {}).items()}
    return spec | {"datasets": tables, "usermeta": {"legends": charts.legends(spec)}}


def _pack_rows(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a table by column: the number of "rows", and "columns" by name.

    A column of text has its distinct values, "names", and for each row the index of its value,
    "at". Any other column is the list of its values.
    """
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        if all(isinstance(value, str) for value in values):
            texts = list(dict.fromkeys(values))
            index_of = {text: number for number, text in enumerate(texts)}
            columns[name] = {"names": texts, "at": [index_of[value] for value in values]}
        else:
            columns[name] = [  # 3 for 3.0 is shorter
                int(value) if isinstance(value, float) and value.is_integer() else value
                for value in values
            ]
    return {"rows": len(rows), "columns": columns}


@cache
def vega_bundle() -> str:
    """Return Vega, Vega-Lite and vega-embed as one script.

    Bundling takes seconds, so that the script is cached.
    """
    path = default_cache_dir() / "vega" / f"vega-{metadata.version('vl-convert-python')}.js"
    with contextlib.suppress(OSError):
        return path.read_bytes().decode("utf-8")
    # The library's type stub wrongly demands an argument.
    script = vl_convert.javascript_bundle()  # pyright: ignore[reportCallIssue]
    with contextlib.suppress(OSError, WakefulError):  # a page does not depend on the cache
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(path) as temporary:
            temporary.write_bytes(script.encode())
    return script
