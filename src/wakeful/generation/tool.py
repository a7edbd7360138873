"""The verb generate: a model and a prompt in, text out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wakeful.config.keywords import accept_options, options_from
from wakeful.generation.options import GenerateOptions
from wakeful.loading.load import load
from wakeful.loading.model import AnyTokenizer
from wakeful.loading.sources import Source
from wakeful.switches import default_torch_state


@accept_options(GenerateOptions)
def generate(
    model: Source,
    prompt: str,
    *,
    tokenizer: AnyTokenizer | str | Path | None = None,
    options: GenerateOptions | None = None,
    **kwargs: Any,
) -> str:
    """Return the text that continues a prompt.

        wakeful.generate("runs/first", "def main(", temperature=0.7)

    Args:
        model: a name, a path, what `wakeful.load` returned, or a module in memory.
        prompt: text to continue; an empty prompt stands for the start of a document.
        tokenizer: the tokenizer of a module in memory.
        options: `GenerateOptions`, whose fields are keyword arguments too.

    Raises:
        WakefulError: an option is out of its range, the context too short, or the chat template
            cannot be used.
    """
    return "".join(stream_text(model, prompt, tokenizer=tokenizer, options=options, **kwargs))


@default_torch_state()
def stream_text(
    model: Source,
    prompt: str,
    *,
    tokenizer: AnyTokenizer | str | Path | None = None,
    options: GenerateOptions | None = None,
    **kwargs: Any,
) -> Iterator[str]:
    """Load a model and return an iterator over the text of `generate`, piece by piece as the model
    writes it.
    """
    options = options_from(GenerateOptions, kwargs, options)
    # dtype="auto" is the stored dtype: generation needs no higher precision.
    loaded = load(
        model, tokenizer=tokenizer, device=options.device, step=options.step, dtype="auto"
    )
    return loaded.stream(
        prompt,
        num_tokens=options.num_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
        bos=options.bos,
        chat=options.chat,
    )
