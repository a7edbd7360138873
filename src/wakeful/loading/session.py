"""How a verb that measures models begins and ends: display, models in turn, a folder."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from wakeful.config.reading import SOURCES, ReadingOptions
from wakeful.device import choose_device, rough_seconds
from wakeful.errors import WakefulError
from wakeful.hf.whole import unbarred
from wakeful.loading.load import load, place_of
from wakeful.loading.model import AnyTokenizer, Model
from wakeful.loading.reading import Words, own_task
from wakeful.loading.sources import Source, dtype_of, in_memory, name_of
from wakeful.model.evaluating import evaluating
from wakeful.reports.result import Result, same_or_each
from wakeful.runs.run import Environment, Run, environment
from wakeful.terminal.display import (
    LONG_SECONDS,
    Display,
    DisplayFactory,
    default_display,
    duration,
)


@dataclass
class Session:
    """One call of a verb."""

    wanted: ReadingOptions
    sources: Sequence[Source]
    tokenizer: AnyTokenizer | str | Path | None
    show: Display
    device: torch.device
    _bos: dict[str, str] = field(default_factory=dict)
    _dtypes: dict[str, str] = field(default_factory=dict)

    def models(self) -> Iterator[Model]:
        """Load models in turn; who takes one must let go of it before asking for the next.

        A model whose name another has already, as two runs of one preset do, is called by its path
        too.

        Raises:
            WakefulError: what `load` raises; or no model is named, or one of them twice.
        """
        sources, wanted = self.sources, self.wanted
        if not sources:
            raise WakefulError(f"name a model: {SOURCES}")
        if self.tokenizer is not None and len(sources) > 1:
            raise WakefulError("one tokenizer is given for several models: load each with its own")
        named = [source for source in sources if isinstance(source, str | Path)]
        if twice := [name for n, name in enumerate(named) if name in named[:n]]:
            raise WakefulError(f"{twice[0]} is named twice: name each model once")
        for name in named:  # before the first one is measured
            _ = place_of(name)
        for source in sources:
            self.show.note(f"loading {name_of(source)}")
            model = load(
                source, tokenizer=self.tokenizer, device=self.device, dtype=wanted.dtype,
                trust_remote_code=wanted.trust_remote_code,
            )  # fmt: skip
            if isinstance(source, str | Path) and model.name in self._bos:
                model = dataclasses.replace(model, name=f"{model.name} ({source})")
            if model.name in self._bos:
                raise WakefulError(f"two models are called {model.name!r}; rename one")
            self._bos[model.name] = bos_words(model, wanted.bos)
            self._dtypes[model.name] = dtype_of(model)
            yield model
            del model

    @property
    def machine(self) -> Environment:
        """The machine that the models run on."""
        return environment(self.device)

    @property
    def bos(self) -> str:
        """The page's words about BOS."""
        return same_or_each(self._bos)

    @property
    def dtype(self) -> str:
        """The arithmetic that models computed in."""
        return same_or_each(self._dtypes)

    def keep(self, result: Result) -> None:
        """Write the folder that was asked for, if any."""
        if self.wanted.out:
            result.save(self.wanted.out)


@contextlib.contextmanager
def session(
    verb: str,
    options: ReadingOptions,
    sources: Sequence[Source],
    tokenizer: AnyTokenizer | str | Path | None,
    display: DisplayFactory | None,
) -> Iterator[Session]:
    """Give the session of a verb, whose folder must not exist and whose device must."""
    modules = in_memory(sources)
    with evaluating(*modules), unbarred(), (display or default_display)(verb) as show:
        if options.out:
            Run(options.out).refuse_existing(verb)
        yield Session(options, sources, tokenizer, show, choose_device(options.device))


def counting(
    show: Display, name: str, model: Model, *, tokens: int, passes: float = 1.0
) -> Callable[[int, int], None]:
    """Return a function that shows the progress of units of `passes` forwards of `tokens`.

    Before the first unit it says how long all of them may take, as `foretell` does.
    """

    def tell(done: int, total: int) -> None:
        if done == 0:
            foretell(show, name, model, tokens=tokens, total=total, passes=passes)
        show.count(name, done, total)

    return tell


def foretell(
    show: Display, name: str, model: Model, *, tokens: int, total: int, passes: float
) -> None:
    """Say how long `total` units of `passes` forwards of `tokens` may take, where that is half a
    minute or more.
    """
    size = sum(parameter.numel() for parameter in model.module.parameters())
    # A forward pass takes about two operations a parameter and token.
    seconds = rough_seconds(2 * size * tokens * total * passes, model.device)
    if seconds >= LONG_SECONDS:
        show.note(
            f"{name}: {total:,} of {tokens:,} tokens, {size / 1e6:,.1f}M parameters; very "
            f"roughly {duration(seconds)} on this machine"
        )


def own_words(model: Model, options: ReadingOptions, words: Words) -> Words:
    """Return a model's words: the task that it was trained on, if any, where none is named."""
    if options.text or not options.source:
        return words
    return own_task(model) or words


def bos_words(model: Model, bos: str) -> str:
    """Return a page's words about BOS for one model."""
    own = ", as its tokenizer does" if bos == "auto" else ""
    return ("before every sequence" if model.begins(bos) else "none") + own  # pyright: ignore
