"""Options of `reproduce`."""

import shlex
from dataclasses import dataclass
from typing import Literal

from wakeful.config.options import HowMuch, What, Where
from wakeful.config.reading import FigureOptions
from wakeful.config.rules import AtLeast, Excludes, Needs


@dataclass(frozen=True, kw_only=True)
class ReproduceOptions(FigureOptions):
    """At which scale, and where; without an exhibit's name, all are listed."""

    scale: HowMuch[Literal["tiny", "small", "paper"]] = "tiny"
    """Minutes on two cores, an hour or so, or the paper's own models and tokens."""
    all: What[bool] = False
    """Run every exhibit that can be run."""
    out: Where[str] = ""
    """Folder of the exhibit. Empty: runs/reproduce/SCALE/PAPER-EXHIBIT. Name the
    same folder again to resume."""
    runs: str = ""
    """Folder of the training runs, which exhibits share. Empty: runs, beside the exhibit's."""
    seeds: HowMuch[tuple[int, ...]] = ()
    """Seeds of every row. Empty: the scale's."""
    steps: HowMuch[int] = 0
    """Steps of the baseline instead of the scale's; other rows keep their ratio to it."""
    text: What[str] = ""
    """Text instead of the scale's: a file, folder, glob, prepared data or hf:NAME."""
    validation_text: str = ""
    """Text to validate on. Empty: a part of the text."""
    tokenizer: str = ""
    """Tokenizer instead of the scale's, or "train" for one of the text. Empty: the scale's."""
    models: What[tuple[str, ...]] = ()
    """Pretrained models instead of the scale's, in the order of the paper's: models that are
    measured, or references of heirs. PLACE=MODEL for one row or group. Empty: the scale's."""
    tasks: What[bool] = False
    """Ask the models the paper's tasks at this scale too, whose data the hub has; else the
    validation loss is judged in their place."""
    device: Where[str] = ""
    """auto, cpu, cuda ... Empty: the scale's."""
    dtype: str = ""
    """Arithmetic of training: float32, bfloat16 ... Empty: the scale's."""
    tuned: str = ""
    """The file tuned.json of an earlier run of the exhibit, whose best learning rates are taken
    without trials."""
    compile: HowMuch[bool] = False
    """Train with torch.compile: faster runs, after half a minute of compilation each. On a CPU it
    needs a C++ compiler. Compiled runs are not those of the same command without this option."""
    cluster: Where[str] = ""
    """Distribute rows and seeds over workers: "local(workers=2)",
    "slurm(workers=8, partition='a')" ..."""

    RULES = (
        AtLeast("steps", 0),
        Needs("validation_text", "text", "it is for a text of your own"),
        Excludes("all", "out", "that is one exhibit's folder"),
        Excludes("all", "tuned", "that is one exhibit's file"),
    )

    @property
    def settings(self) -> tuple[str, ...]:
        """Settings besides scale and seeds that decide the figures, as on the command line."""
        texts = {
            "steps": str(self.steps or ""), "text": self.text, "tokenizer": self.tokenizer,
            "validation_text": self.validation_text, "dtype": self.dtype, "tuned": self.tuned,
        }  # fmt: skip
        arguments = [[f"--{name}", value] for name, value in texts.items() if value]
        arguments += [["--models", *self.models]] if self.models else []
        flags = {"tasks": self.tasks, "compile": self.compile}
        arguments += [[f"--{name}"] for name, value in flags.items() if value]
        return tuple(map(shlex.join, arguments))
