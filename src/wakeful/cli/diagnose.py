"""The verb diagnose: its options and what they start."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wakeful.cli.console import OUT, display, tell
from wakeful.cli.parsing import leading, parse
from wakeful.errors import WakefulError


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions:
    """What to measure, on what."""

    text: str = ""
    """Text to run the model on: a file, folder or glob. Empty: what data names."""
    data: str = "python-stdlib"
    """Text by name: python-stdlib, or hf:NAME for a Hugging Face dataset."""
    length: int = 512
    """Tokens a sequence."""
    num_sequences: int = 4
    """Sequences, one after another from the text's beginning."""
    out: str = ""
    """Folder to create. Empty: runs/diagnose-MODEL."""
    bos: bool = False
    """Begin every sequence with the model's BOS token."""
    tau: float = 0.9
    """Share of a head's energy that its rank holds."""
    lazy_rank: float = 2.0
    """A layer is lazy when no head's rank is above this."""
    rank_tokens: int = 2048
    """Longest sequence whose ranks are settled exactly; past it they may be bounds."""
    rank_seconds: float = 600.0
    """Time for exact ranks; past it they may be bounds."""
    layers: tuple[int, ...] = ()
    """Layers whose attention is pictured. Empty: four, spread over the depth."""
    heads: tuple[int, ...] = (0, 1, 2, 3)
    """Heads whose attention is pictured."""
    device: str = "auto"
    """auto, cpu, cuda ..."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Arithmetic of the model; metrics are float32 or better."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Leave it out for models you do not trust."""
    figures: tuple[Literal["svg", "png", "pdf"], ...] = ()
    """Write the charts for a paper too, in these formats, into the folder figures."""


def run(arguments: list[str]) -> None:
    """MODEL... [options]: measure sinks, lazy layers, drained values and outliers."""
    from wakeful.world import joined

    with joined() as world:
        _diagnose(arguments, speaks=world.first)


def _diagnose(arguments: list[str], *, speaks: bool) -> None:
    from wakeful.verbs.diagnose import run_diagnosis

    models, rest = leading(arguments)
    options = parse(DiagnoseOptions, rest, "diagnose MODEL...", None)
    if not models:
        raise WakefulError(
            "name a model: a run directory, a Transformers folder, a GGUF file, smollm2 or a hub "
            "name"
        )
    settings = dataclasses.asdict(options)
    out = Path(settings.pop("out") or f"runs/diagnose-{Path(models[0]).name}")
    with display("diagnose", speaks=speaks) as show:
        run, grid = run_diagnosis(models, out, show=show, **settings)
    if speaks:
        OUT.print(grid)
        tell(f"report: {run.path / 'report.html'}")
