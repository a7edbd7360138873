"""Options of `export`."""

from dataclasses import dataclass
from typing import Literal

from wakeful.config.options import How, What
from wakeful.config.reading import StoredDtype
from wakeful.config.rules import Forbids


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Format and precision of an exported model."""

    dtype: How[StoredDtype] = "auto"
    """Type of the weights written to a folder. auto: as they are stored, a run's in float32."""
    gguf: How[Literal["auto", "f32", "f16", "q8_0", "q4_0"]] = "auto"
    """Type of the matrices in a file NAME.gguf. auto: f16. llama.cpp makes other types of it."""
    step: What[int] = 0
    """Checkpoint of the run to write, by its step. 0 means the newest."""


FILE_RULES = (Forbids("dtype", "it is for a folder; --gguf says what a file stores"),)
"""Of a file NAME.gguf."""
FOLDER_RULES = (Forbids("gguf", "it is for a file, and a file's name ends in .gguf"),)
MEMORY_RULES = (Forbids("step", "it is for a run, and this model is in memory"),)
