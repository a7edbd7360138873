"""Where what was made once is kept for next time."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """`$WAKEFUL_CACHE`, else `$XDG_CACHE_HOME/wakeful`, else `~/.cache/wakeful`."""
    if own := os.environ.get("WAKEFUL_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "wakeful"
    return Path.home() / ".cache" / "wakeful"
