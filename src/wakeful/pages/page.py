"""One offline HTML page out of a template: every kind of page is filled in and written here."""

import base64
import hashlib
import itertools
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import jinja2
import vl_convert
from markupsafe import Markup

from wakeful.errors import WakefulError
from wakeful.estimates import mean_and_error, to_error, with_error
from wakeful.pages.charts import drawable, slug, specification, theme
from wakeful.pages.pictures import Pictures
from wakeful.pages.terms import explained
from wakeful.paths import default_cache_dir
from wakeful.runs.run import replaced


@dataclass(frozen=True)
class Step:
    """What to do next: in words, and as the command to type."""

    words: str
    command: str


def listed(names: Iterable[object]) -> str:
    """Return "a, b and c"; nothing of no names."""
    *before, last = [*map(str, names)] or [""]
    return f"{', '.join(before)} and {last}" if before else last


_TEMPLATES = Path(__file__).parent / "templates"


def write_page(
    path: str | Path, template: str, *, package: str = "wakeful.pages", **values: Any
) -> Path:
    """Fill one of a package's templates; every value is escaped, and an old page stays until the
    new one is whole.

    Only the two scripts that are the package's own can run: the page names them by their hash, so
    that a script in a value would be refused even if it were not escaped.
    """
    places = dict.fromkeys((package, "wakeful.pages"))
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(each) for each in places]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["spec"] = specification
    environment.filters["drawable"] = drawable
    environment.filters["json"] = _json
    environment.filters["packed"] = _packed
    pictures = Pictures()
    environment.filters["place_picture"] = pictures.place
    environment.filters["fill_pictures"] = pictures.fill
    environment.filters["anchors"] = _anchors
    environment.filters["slug"] = slug
    environment.filters["to_error"] = to_error
    environment.filters["with_error"] = with_error
    environment.filters["figure"] = _figure
    environment.filters["times"] = _times
    environment.filters["explained"] = explained
    environment.globals["means_over_layers"] = "over block outputs, the embedding left out"
    environment.globals["next_id"] = itertools.count(1).__next__
    scripts = [_script(vega_bundle()), _script((_TEMPLATES / "page.js").read_text("utf-8"))]
    html = environment.get_template(f"{template}.html.j2").render(
        scripts=scripts,
        hashes=" ".join(_hash(script) for script in scripts),
        themes=_json({"light": theme(), "dark": theme(dark=True)}),
        **values,
    )
    path = Path(path)
    with replaced(path) as temporary:
        temporary.write_text(html, "utf-8")
    return path


def _figure(value: float) -> str:
    """Return a figure to three or more digits, small ones with a power of ten, counts whole."""
    if 0 < abs(value) < 1e-3:
        text = f"{value:.2g}"
    elif value == 0 or (abs(value) >= 100 and value == round(value)):
        text = f"{value:,.0f}"
    elif abs(value) >= 100:
        text = f"{value:,.1f}"
    else:
        text = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return text.replace("-", "−")


def _times(ratio: float, ratios: Sequence[float]) -> str:
    """Return a ratio to the digits that its spread allows; two where nothing spreads."""
    error = mean_and_error(ratios)[1] if len(ratios) > 1 else 0.0
    return to_error(ratio, error) if error > 0 else f"{ratio:.2g}"


def _anchors(content: Markup) -> tuple[list[tuple[str, Markup]], Markup]:
    """Return each h2's name and title, and the content with those names at its h2."""
    titles: list[tuple[str, Markup]] = []

    def named(match: re.Match[str]) -> str:
        titles.append((f"part-{len(titles) + 1}", Markup(match[1])))
        return f'<h2 id="{titles[-1][0]}">{match[1]}</h2>'

    # Values are escaped: every <h2> is a template's.
    return titles, Markup(re.sub("<h2>(.*?)</h2>", named, content))


def rough(value: float) -> str:
    """Return a figure that noise leaves three digits of: "58,900", "7.31"."""
    if value <= 0:
        return f"{value:g}".replace("-", "−")
    places = 2 - math.floor(math.log10(value))
    return f"{round(value, places):,.{max(0, places)}f}"


def _script(text: str) -> Markup:
    return Markup(text.replace("</script", "<\\/script"))


def _hash(script: str) -> str:
    """Return a script's name in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _json(value: Any) -> Markup:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _packed(spec: dict[str, Any]) -> dict[str, Any]:
    """Return a specification with its rows as columns, a third of the size; page.js unpacks them.

    A column of text is its names and, for each row, which of them it is.
    """
    tables = {name: _columns(rows) for name, rows in spec.get("datasets", {}).items()}
    return spec | {"datasets": tables}


def _columns(rows: list[dict[str, Any]]) -> dict[str, Any]:
    columns: dict[str, Any] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        if all(isinstance(value, str) for value in values):
            names = list(dict.fromkeys(values))
            place = {text: number for number, text in enumerate(names)}
            columns[name] = {"names": names, "at": [place[value] for value in values]}
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
        with replaced(path) as temporary:
            temporary.write_bytes(f"{_head(script)}\n{script}".encode())
    except (OSError, WakefulError):
        pass  # a page does not depend on the cache
    return script


def _head(script: str) -> str:
    return f"// sha256 {hashlib.sha256(script.encode()).hexdigest()}"
