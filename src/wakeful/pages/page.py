"""One offline HTML page out of a template: every kind of page is filled in here."""

import base64
import hashlib
import itertools
import json
import math
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from wakeful.estimates import with_error
from wakeful.pages.charts import Drawing, specification, theme
from wakeful.pages.vega import vega_bundle

_TEMPLATES = Path(__file__).parent / "templates"


def render(template: str, **values: Any) -> str:
    """Fill one of the package's templates; every value is escaped.

    Only the two scripts that are the package's own can run: the page names them by their hash, so
    that a script in a value would be refused even if it were not escaped.
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("wakeful.pages"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["spec"] = _spec
    environment.filters["with_error"] = _with_error
    environment.filters["figure"] = _figure
    environment.globals["means_over_layers"] = "over block outputs, the embedding left out"
    environment.globals["next_id"] = itertools.count(1).__next__
    scripts = [_script(vega_bundle()), _script((_TEMPLATES / "page.js").read_text("utf-8"))]
    return environment.get_template(template).render(
        scripts=scripts,
        hashes=" ".join(_hash(script) for script in scripts),
        themes=_json({"light": theme(), "dark": theme(dark=True)}),
        **values,
    )


def _with_error(value: float, error: float, sign: str = "") -> str:
    return with_error(value, error, sign).replace("-", "−")


def _figure(value: float) -> str:
    """Return a figure to three or more digits, small ones too."""
    if value == 0 or abs(value) >= 100:
        text = f"{value:,.1f}"
    else:
        text = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return text.replace("-", "−")


def _script(text: str) -> Markup:
    return Markup(text.replace("</script", "<\\/script"))


def _hash(script: str) -> str:
    """Return a script's name in a Content-Security-Policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _spec(chart: Drawing) -> Markup:
    return _json(specification(chart))


def _json(value: Any) -> Markup:
    """Return JSON that is safe inside a script element."""
    text = json.dumps(value, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)
