"""The verb generate: its options and what they start."""

import sys
from dataclasses import dataclass

from wakeful.cli.console import standard_input
from wakeful.cli.parsing import leading, parse
from wakeful.errors import WakefulError

SUMMARY = "Continue a prompt with a trained model."


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
    step: int = 0
    """Checkpoint to use, by its step. 0 means the newest."""
    device: str = "auto"
    """auto, cpu, cuda ..."""


def run(arguments: list[str]) -> None:
    """RUN --prompt TEXT: continue a text, token by token."""
    from wakeful.data.tokenizer import StreamDecoder
    from wakeful.model.generate import generate
    from wakeful.train.restore import encode_prompt, restore

    paths, rest = leading(arguments)
    options = parse(GenerateOptions, rest, "generate RUN", None)
    if len(paths) != 1:
        raise WakefulError("name one run directory")
    prompt = standard_input() if options.prompt == "-" else options.prompt
    trained = restore(paths[0], step=options.step, device=options.device)
    stream = StreamDecoder(trained.tokenizer)
    tokens = generate(
        trained.decoder,
        encode_prompt(trained, prompt),
        num_tokens=options.num_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        stop=trained.tokenizer.end_of_text,
    )
    sys.stdout.write(prompt)
    for token in tokens:
        sys.stdout.write(stream.push(token))
        sys.stdout.flush()
    sys.stdout.write(stream.flush() + "\n")
