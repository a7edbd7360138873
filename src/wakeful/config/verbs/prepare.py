"""Options of `data prepare`."""

from dataclasses import dataclass

from wakeful.config.options import Where
from wakeful.config.schema import TRAINED, TextConfig


@dataclass(frozen=True, kw_only=True)
class PrepareOptions(TextConfig):
    """How to turn text into memory-mapped tokens.

    wakeful data generate --help: text that a model writes.
    """

    out: Where[str]
    """Folder to create."""

    RULES = (TRAINED,)
