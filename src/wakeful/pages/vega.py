"""The JavaScript that draws a page's charts, bundled once and kept."""

import hashlib
from functools import cache
from importlib import metadata
from pathlib import Path

import vl_convert

from wakeful.errors import WakefulError
from wakeful.paths import default_cache_dir
from wakeful.runs.run import replaced


@cache
def vega_bundle() -> str:
    """Return Vega, Vega-Lite and what embeds them, as one script.

    Bundling takes seconds, so the script is kept in the cache folder, its SHA-256 in the first
    line; one that does not match, or a cache that cannot be written, means bundling again.
    """
    path = default_cache_dir() / "vega" / f"vl-convert-{metadata.version('vl-convert-python')}.js"
    script = _kept(path)
    if script is None:
        # Its type stub forgets that the snippet may be left out.
        script = vl_convert.javascript_bundle()  # pyright: ignore[reportCallIssue]
        _keep(path, script)
    return script


def _kept(path: Path) -> str | None:
    try:
        head, _, script = path.read_bytes().decode("utf-8").partition("\n")
    except (OSError, UnicodeDecodeError):
        return None
    return script if head == _head(script) else None


def _keep(path: Path, script: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced(path) as temporary:
            temporary.write_bytes(f"{_head(script)}\n{script}".encode())
    except (OSError, WakefulError):
        return  # a page does not hang on the cache


def _head(script: str) -> str:
    return f"// sha256 {hashlib.sha256(script.encode()).hexdigest()}"
