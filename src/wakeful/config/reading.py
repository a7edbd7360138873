"""Options of verbs that read a text with a model."""

import shlex
from dataclasses import dataclass
from typing import Literal

from wakeful.config.options import HowMuch, What, Where
from wakeful.config.refusals import Ruled
from wakeful.config.schema import DataConfig
from wakeful.errors import WakefulError

Bos = Literal["auto", "on", "off"]
Dtype = Literal["float32", "float64", "bfloat16"]
Stored = Literal["auto", "float32", "bfloat16", "float16"]
"""Type of the weights that are written; "auto": of the files they come from."""
FigureFormat = Literal["svg", "png", "pdf", "csv"]
"""Format of a chart that is written; csv is the rows that it draws."""
TableFormat = Literal["csv", "tex", "md"]
"""Format of a table of results."""
REFERENCES = "a run directory, a Transformers folder, a GGUF file, smollm2 or a hub name"
"""Names of a model that others are made from."""
SOURCES = (
    "a run directory, a Transformers folder, a GGUF file, smollm2, a hub name or a quantized model"
)
"""Names of any model."""


DECODED = 32
"""Tokens that are timed after each prompt and its first token."""
LENGTH = 512
"""Tokens a sequence where neither the user nor the model's context says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Drawn(Ruled):
    """Options of verbs that draw charts."""

    figures: Where[tuple[FigureFormat, ...]] = ()
    """Write the charts for a paper too, in these formats, into the folder figures."""


@dataclass(frozen=True, kw_only=True)
class Reading(Drawn):
    """A model and the text it reads."""

    text: What[str] = ""
    """Text to read: a file, folder or glob, hf:NAME, or a task: backcopy(triggers=3). Empty: a
    run's own task, or python-stdlib."""
    length: HowMuch[int] = 0
    """Tokens per sequence. 0: 512, or the model's context where that is shorter."""
    bos: Bos = "auto"
    """BOS before every sequence: as the model's own tokenizer does (auto), on, or off."""
    out: Where[str] = ""
    """Folder to create. Empty: runs/VERB-MODEL, numbered where that exists."""
    device: Where[str] = "auto"
    """auto, cpu, cuda ..."""
    dtype: Dtype = "float32"
    """Arithmetic of the full-precision model; what is measured is float32 or better."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Leave it out for models you do not trust."""

    def __post_init__(self) -> None:
        if self.length < 0 or self.length == 1:
            raise WakefulError(f"length = {self.length}: a sequence needs at least 2 tokens")
        super().__post_init__()

    @property
    def source(self) -> str:
        """The text to read."""
        return self.text or DataConfig.source

    @property
    def text_flags(self) -> str:
        """The flags by which another command reads the same text."""
        flags = ["--text", self.text] if self.text else []
        flags += [] if self.bos == "auto" else ["--bos", self.bos]
        flags += ["--trust_remote_code"] if self.trust_remote_code else []
        return shlex.join(flags)

    def length_for(self, context: int) -> int:
        """Return the tokens a sequence for a model with this context."""
        return self.length or min(LENGTH, context)


def longest_prompt(context: int) -> int:
    """Return the tokens of the longest prompt whose timed continuation fits into a context."""
    return context - DECODED - 1
