"""How a verb that measures models begins and ends: processes, display, models in turn, a folder."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from wakeful.config.verbs.reading import Reading
from wakeful.device import choose_device, rough_seconds
from wakeful.display import LONG, Display, Shown, duration
from wakeful.evaluation.reading import Words, own_task
from wakeful.loading.model import AnyTokenizer, Model
from wakeful.runs.run import Environment, Run, environment
from wakeful.verbs.result import Result, Source, dtype_of, each_model, same_or_each, showing
from wakeful.world import World, joined


@dataclass
class Session:
    """One call of a verb, on every process that takes part."""

    wanted: Reading
    world: World
    show: Display
    machine: Environment
    _bos: dict[str, str] = field(default_factory=dict)
    _dtypes: dict[str, str] = field(default_factory=dict)

    def each(
        self, sources: Sequence[Source], tokenizer: AnyTokenizer | str | Path | None
    ) -> Iterator[Model]:
        """Load models in turn; who takes one must let go of it before asking for the next."""
        for model in each_model(sources, self.wanted, tokenizer, self.show, self.world):
            self._bos[model.name] = bos_words(model, self.wanted.bos)
            self._dtypes[model.name] = dtype_of(model)
            yield model
            del model

    @property
    def bos(self) -> str:
        """The page's words about BOS."""
        return same_or_each(self._bos)

    @property
    def dtype(self) -> str:
        """The arithmetic that models computed in."""
        return same_or_each(self._dtypes)

    def keep(self, result: Result) -> None:
        """Write the folder that was asked for, if any; of several processes the first does."""
        if self.wanted.out and self.world.first:
            result.save(self.wanted.out)


@contextlib.contextmanager
def session(verb: str, wanted: Reading, shown: Shown | None) -> Iterator[Session]:
    """Give the session of a verb, whose folder must not exist and whose device must."""
    with joined() as world, showing(shown, verb, world) as show:
        if wanted.out and world.first:
            Run(wanted.out).refuse_existing(verb)
        machine = environment(choose_device(wanted.device, world), world.size)
        yield Session(wanted, world, show, machine)


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
    if seconds >= LONG:
        show.note(
            f"{name}: {total:,} of {tokens:,} tokens, {size / 1e6:,.1f}M parameters; very "
            f"roughly {duration(seconds)} on this machine"
        )


def own_words(model: Model, wanted: Reading, words: Words) -> Words:
    """Return a model's words: the task that it was trained on, if any, where none is named."""
    if wanted.text or not wanted.source:
        return words
    return own_task(model) or words


def bos_words(model: Model, bos: str) -> str:
    """Return a page's words about BOS for one model."""
    own = ", as its tokenizer does" if bos == "auto" else ""
    return ("before every sequence" if model.begins(bos) else "none") + own  # pyright: ignore
