"""The verb generate: its options and what they start."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wakeful.cli.console import standard_input
from wakeful.cli.parsing import leading, parse
from wakeful.errors import WakefulError

if TYPE_CHECKING:
    from wakeful.data.tokenizer import Tokenizer

    Begun = tuple[Tokenizer, Iterator[int]]


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
    """MODEL --prompt TEXT: continue a text, token by token."""
    from wakeful.data.decoding import StreamDecoder

    paths, rest = leading(arguments)
    options = parse(GenerateOptions, rest, "generate MODEL", None)
    if len(paths) != 1:
        raise WakefulError(
            "name one model: a run directory, a Transformers folder, a GGUF file, smollm2, a hub "
            "name or a quantised model"
        )
    prompt = standard_input() if options.prompt == "-" else options.prompt
    tokenizer, tokens = _reader(paths[0])(paths[0], prompt, options)
    stream = StreamDecoder(tokenizer)
    sys.stdout.write(prompt)
    for token in tokens:
        sys.stdout.write(stream.push(token))
        sys.stdout.flush()
    sys.stdout.write(stream.flush() + "\n")


def _reader(path: str) -> "Callable[[str, str, GenerateOptions], Begun]":
    from wakeful.hf.quantized import is_quantised_folder

    folder = Path(path)
    if is_quantised_folder(folder):
        return _quantised
    try:
        is_run = (folder / "run.json").is_file()
        is_model = not folder.is_dir() or (folder / "config.json").is_file()
    except OSError as error:  # a name too long
        raise WakefulError(f"{path[:60]!r}... is no model: {error.strerror}") from None
    # A folder that is nothing else is a run directory that lacks something.
    return _trained if is_run or not is_model else _imported


def _imported(path: str, prompt: str, options: GenerateOptions) -> "Begun":
    from wakeful.device import choose_device
    from wakeful.hf.weights_in import read_decoder
    from wakeful.model.generate import generate

    if options.step:
        raise WakefulError(f"{path} is no run directory: it has no steps, so leave out --step")
    found = read_decoder(path, device=choose_device(options.device))
    tokens = found.tokenizer.encode(prompt) or [found.tokenizer.end_of_text]
    return found.tokenizer, generate(found.decoder, tokens, **_choice(options, found.tokenizer))


def _trained(path: str, prompt: str, options: GenerateOptions) -> "Begun":
    from wakeful.model.generate import generate
    from wakeful.runs.restore import encode_prompt, restore

    trained = restore(path, step=options.step, device=options.device)
    tokens = encode_prompt(trained, prompt)
    choice = _choice(options, trained.tokenizer)
    return trained.tokenizer, generate(trained.decoder, tokens, **choice)


def _quantised(path: str, prompt: str, options: GenerateOptions) -> "Begun":
    from transformers import PreTrainedModel

    from wakeful.data.tokenizer import Tokenizer
    from wakeful.device import choose_device
    from wakeful.hf.generate import generate_transformers
    from wakeful.hf.quantized import load_quantised
    from wakeful.model.decoder import Decoder
    from wakeful.model.generate import generate

    if options.step:
        raise WakefulError(f"{path} is a quantised model: it has no steps, so leave out --step")
    model, header = load_quantised(Path(path), device=choose_device(options.device))
    tokenizer = Tokenizer.load(path)
    tokens = tokenizer.encode(prompt) or [tokenizer.end_of_text]
    choice = _choice(options, tokenizer)
    if isinstance(model, Decoder):
        return tokenizer, generate(model, tokens, **choice)
    assert isinstance(model, PreTrainedModel)
    return tokenizer, generate_transformers(model, tokens, context=header["context"], **choice)


def _choice(options: GenerateOptions, tokenizer: "Tokenizer") -> dict[str, Any]:
    return {
        "num_tokens": options.num_tokens,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "seed": options.seed,
        "stop": tokenizer.end_of_text,
    }
