"""One offline HTML page out of a template: every kind of page is filled in and written here."""

import base64
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
def write(report: Report, path: str | Path, figures: Sequence[str] = ()) -> Path:
    """Write a report as one offline page; an old page stays until the new one is whole. Its charts
    are written in the formats of `figures` too, into a folder of that name beside it.

    Every value is escaped, and only the two scripts that are the package's own can run: the page
    names them by their hash, so that a script in a value would be refused even if it were not.
    """
    scripts = [_script(vega_bundle()), _script((_TEMPLATES / "page.js").read_text("utf-8"))]
    template = _environment().get_template("report.html.j2")
    html = template.render(
        report=report,
        scripts=scripts,
        hashes=" ".join(_hash(script) for script in scripts),
        themes={"light": charts.theme(), "dark": charts.theme(dark=True)},
    )
    path = Path(path)
    with replace_atomically(path) as temporary:
        temporary.write_text(html, "utf-8")
    charts.save_figures(report.charts() if figures else (), path.parent / "figures", figures)
    return path


def notebook(report: Report) -> str:
    """Return what a notebook shows: in short what was found and the first chart, with nothing to
    fetch and nothing that runs.
    """
    template = _environment().get_template("notebook.html.j2")
    return template.render(report=report, chart=report.picture)


def _environment() -> jinja2.Environment:
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
    environment.globals["next_id"] = itertools.count(1).__next__
    return environment


def _picture(spec: dict[str, Any]) -> Markup:
    """Return a chart as the address of an image that holds it."""
    png = vl_convert.vegalite_to_png(charts.still(spec, _NOTEBOOK), scale=2)
    return Markup(f"data:image/png;base64,{base64.b64encode(png).decode()}")


def _looks(names: Sequence[str]) -> list[tuple[str, str, list[int], str]]:
    """Return each name with its color, dash and shape."""
    return [
        *zip(names, charts.colors(names), charts.dashes(names), charts.shapes(names), strict=True)
    ]


def _script(text: str) -> Markup:
    return Markup(text.replace("</script", "<\\/script"))


def _hash(script: str) -> str:
    """Return a script's name in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _pack_columns(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a specification with its rows as columns, a third of the size, which page.js unpacks,
    and what its legends need.

    A column of text is its names and, for each row, which of them it is.
    """
    tables = {name: _columns(rows) for name, rows in spec.get("datasets", {}).items()}
    wide = charts.name_width(charts.add_legends(spec))
    options = {"legends": charts.legends(spec), "nameWidth": wide}
    return spec | {"datasets": tables, "usermeta": options}


def _columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        if all(isinstance(value, str) for value in values):
            names = list(dict.fromkeys(values))
            positions = {text: number for number, text in enumerate(names)}
            columns[name] = {"names": names, "at": [positions[value] for value in values]}
        else:
            columns[name] = [
                int(value) if isinstance(value, float) and value.is_integer() else value
                for value in values
            ]
    return {"rows": len(rows), "columns": columns}


@cache
def vega_bundle() -> str:
    """Return Vega, Vega-Lite and what embeds them, as one script.

    Bundling takes seconds, so the script is kept in the cache folder, its SHA-256 in the first
    line; one that does not match, or a cache that cannot be written, means bundling again.
    """
    path = default_cache_dir() / "vega" / f"vl-convert-{metadata.version('vl-convert-python')}.js"
    try:
        head, _, script = path.read_bytes().decode("utf-8").partition("\n")
        if head == _head(script):
            return script
    except (OSError, UnicodeDecodeError):
        pass
    # Its type stub forgets that the snippet may be left out.
    script = vl_convert.javascript_bundle()  # pyright: ignore[reportCallIssue]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replace_atomically(path) as temporary:
            temporary.write_bytes(f"{_head(script)}\n{script}".encode())
    except (OSError, WakefulError):
        pass  # a page does not depend on the cache
    return script


def _head(script: str) -> str:
    return f"// sha256 {hashlib.sha256(script.encode()).hexdigest()}"
