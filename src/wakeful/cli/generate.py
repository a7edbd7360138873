"""The verb generate: its options and what they start."""

import sys
from dataclasses import dataclass
from typing import Literal

from wakeful.cli.console import standard_input
from wakeful.cli.parsing import leading, parse
from wakeful.errors import WakefulError


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """How to continue a prompt."""

    prompt: str
    """Text to continue. A single dash reads it from standard input."""
    num_tokens: int = 100
    """Most tokens to add."""
    temperature: float = 0.8
    """Divides the logits; 0 takes the likeliest token every time."""
    top_k: int = 50
    """Choose among so many likeliest tokens. 0 means all."""
    top_p: float = 1.0
    """Choose among the likeliest tokens that together reach this probability."""
    seed: int = 0
    """Seed of the choice."""
    bos: Literal["auto", "on", "off"] = "auto"
    """BOS token before the prompt: as the model's own tokenizer does, always, or never."""
    step: int = 0
    """Checkpoint to use, by its step. 0 means the newest."""
    device: str = "auto"
    """auto, cpu, cuda ..."""


def run(arguments: list[str]) -> None:
    """MODEL --prompt TEXT: continue a text, token by token."""
    from wakeful.loading.load import load

    paths, rest = leading(arguments)
    options = parse(GenerateOptions, rest, "generate MODEL", None)
    if len(paths) != 1:
        raise WakefulError(
            "name one model: a run directory, a Transformers folder, a GGUF file, smollm2, a hub "
            "name or a quantised model"
        )
    prompt = standard_input() if options.prompt == "-" else options.prompt
    model = load(paths[0], device=options.device, dtype="auto", step=options.step)
    pieces = model.stream(
        prompt,
        num_tokens=options.num_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        bos=options.bos,
    )
    sys.stdout.write(prompt)
    for piece in pieces:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
