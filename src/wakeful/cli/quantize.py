"""The verb quantize: its options and what they start."""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wakeful.cli.console import OUT, display, tell
from wakeful.cli.parsing import leading, parse
from wakeful.errors import WakefulError


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """How to quantise, and what text to measure the damage on."""

    scheme: tuple[str, ...] = ("fine", "moderate", "coarse", "w4")
    """fine, moderate, coarse, w4, or expressions: weights=absmax6/channel,inputs=absmax8/token."""
    scales: tuple[Literal["dynamic", "static"], ...] = ("dynamic",)
    """Activation scales: of the text at hand, or calibrated once; both measure each that can be."""
    text: str = ""
    """Text to measure on: a file, folder or glob. Empty: what data names."""
    data: str = "python-stdlib"
    """Text by name: python-stdlib, or hf:NAME for a Hugging Face dataset."""
    length: int = 512
    """Tokens a sequence."""
    num_sequences: int = 8
    """Sequences to measure on, one after another from the text's beginning."""
    calibration_sequences: int = 4
    """Sequences for static scales, the next ones of the text."""
    out: str = ""
    """Folder to create. Empty: runs/quantize-MODEL."""
    save: str = ""
    """Folder to create with the quantised model, to load and generate from. Takes one scheme."""
    arithmetic: Literal["reference", "integer", "torchao"] = "integer"
    """Dequantised numbers, int8 products, or torchao's kernels; the same to rounding."""
    skip: tuple[str, ...] = ()
    """Layers to leave in full precision, by name or pattern: lm_head, *.down_proj."""
    bos: bool = False
    """Begin every sequence with the model's BOS token."""
    device: str = "auto"
    """auto, cpu, cuda ..."""
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    """Arithmetic of the full-precision model and of the layers that stay."""
    trust_remote_code: bool = False
    """Run code that comes with the model. Leave it out for models you do not trust."""
    figures: tuple[Literal["svg", "png", "pdf"], ...] = ()
    """Write the charts for a paper too, in these formats, into the folder figures."""


def run(arguments: list[str]) -> None:
    """MODEL [options]: quantise a model and measure what that costs."""
    from wakeful.verbs.quantize import run_quantize

    models, rest = leading(arguments)
    options = parse(QuantizeOptions, rest, "quantize MODEL", None)
    if len(models) != 1:
        raise WakefulError(
            "name one model: a run directory, a Transformers folder, a GGUF file, smollm2 or a hub "
            "name"
        )
    settings = dataclasses.asdict(options)
    out = Path(settings.pop("out") or f"runs/quantize-{Path(models[0]).name}")
    with display("quantize") as show:
        run, grid = run_quantize(models[0], out, show=show, **settings)
    OUT.print(grid)
    if options.save:
        tell(f"quantised model: {options.save}")
    tell(f"report: {run.path / 'report.html'}")
