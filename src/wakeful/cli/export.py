"""The verb export: its options and what they start."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wakeful.cli.console import tell
from wakeful.cli.parsing import leading, parse
from wakeful.errors import WakefulError


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """How to write it."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    """Type of the weights written."""
    step: int = 0
    """Checkpoint of the run to write, by its step. 0 means the newest."""


def run(arguments: list[str]) -> None:
    """RUN DIR [options]: write a model for Hugging Face Transformers."""
    import torch

    from wakeful.verbs.export import export_model

    paths, rest = leading(arguments)
    options = parse(ExportOptions, rest, "export RUN DIR", None)
    if len(paths) != 2:
        raise WakefulError("name a model to export and a folder to write: wakeful export RUN DIR")
    kind = export_model(
        paths[0], Path(paths[1]), dtype=getattr(torch, options.dtype), step=options.step
    )
    own = ", trust_remote_code=True" if kind == "wakeful" else ""
    tell(f'{kind}: AutoModelForCausalLM.from_pretrained("{paths[1]}"{own})')
