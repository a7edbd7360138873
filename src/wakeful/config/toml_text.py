"""TOML that somebody else wrote, parsed in a bounded time and amount of memory."""

import re
import tomllib
from typing import Any

from wakeful.errors import WakefulError

_LARGEST = 2**18
"""Bytes of a file; a configuration has some thousand."""
_MOST_DOTS = 200
"""Of a line without an equals sign: a name of n parts takes the parser n² of everything."""


def parse_toml(content: bytes, name: str) -> dict[str, Any]:
    """Return the table of a TOML text that is called `name`.

    Raises:
        WakefulError: it is not TOML, or larger than any configuration is.
    """
    if len(content) > _LARGEST:
        raise WakefulError(f"{name} has {len(content):,} bytes, and at most {_LARGEST:,} are read")
    if max(part.count(b".") for part in re.split(rb"[=\n]", content)) > _MOST_DOTS:
        raise WakefulError(f"{name} has a line with more than {_MOST_DOTS} dots in a row of names")
    try:
        return tomllib.loads(content.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # a ValueError too: a number of 5,000 digits
        raise WakefulError(f"{name} is not TOML: {error}") from None
