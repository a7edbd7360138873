"""Options of verbs that run a model on a text."""

import shlex
from dataclasses import dataclass
from typing import Literal

from wakeful.config.options import HowMuch, What, Where
from wakeful.config.rules import RuleChecked
from wakeful.config.schema import DataConfig
from wakeful.errors import WakefulError

Bos = Literal["auto", "on", "off"]
Dtype = Literal["float32", "float64", "bfloat16"]
StoredDtype = Literal["auto", "float32", "bfloat16", "float16"]
"""Type of the weights that are written; "auto": that of the files they come from."""
FigureFormat = Literal["svg", "png", "pdf"]
"""Format of a chart that is written."""
REFERENCES = "a run directory, a Transformers folder, a GGUF file, smollm2 or a hub name"
"""Accepted names of a model that other models are derived from."""
SOURCES = (
    "a run directory, a Transformers folder, a GGUF file, smollm2, a hub name or a quantized model"
)
"""Accepted names of any model."""


DECODED_TOKENS = 32
"""Tokens timed after each prompt and its first token."""
LENGTH = 512
"""Default number of tokens per sequence."""


@dataclass(frozen=True, kw_only=True)
class FigureOptions(RuleChecked):
    """Options of verbs that draw charts."""

    figures: Where[tuple[FigureFormat, ...]] = ()
    """Also write the charts for a paper, in these formats, into the folder figures."""


@dataclass(frozen=True, kw_only=True)
class ReadingOptions(FigureOptions):
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
        """Name of the text to read; the default text if `text` is empty."""
        return self.text or DataConfig.source

    @property
    def text_flags(self) -> str:
        """Flags by which another command reads the same text."""
        flags = ["--text", self.text] if self.text else []
        flags += [] if self.bos == "auto" else ["--bos", self.bos]
        flags += ["--trust_remote_code"] if self.trust_remote_code else []
        return shlex.join(flags)

    def length_for(self, context: int) -> int:
        """Return the tokens per sequence for a model with this context length."""
        return self.length or min(LENGTH, context)


def longest_prompt(context: int) -> int:
    """Return the number of tokens of the longest prompt to time in a context of `context` tokens.

    The prompt leaves room for the token that follows it and for `DECODED_TOKENS` more.
    """
    return context - 1 - DECODED_TOKENS
