"""Session of a tool that measures models: its display, its models in turn, its folder."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from wakeful.config.reading import SOURCES, ReadingOptions
from wakeful.device import choose_device, estimate_seconds
from wakeful.errors import WakefulError
from wakeful.hf.checkpoint_reader import disable_progress_bars
from wakeful.loading.load import load, locate_model
from wakeful.loading.model import AnyTokenizer, Model
from wakeful.loading.reading import EvaluationData, training_task
from wakeful.loading.sources import Source, dtype_name, modules_in_memory, source_name
from wakeful.model.evaluating import evaluating
from wakeful.reports.result import Result, same_or_each
from wakeful.runs.run import Environment, Run, environment
from wakeful.terminal.display import (
    LONG_SECONDS,
    Display,
    DisplayFactory,
    default_display,
    format_duration,
)


@dataclass
class Session:
    """One call of a tool that measures models: its options, models, display and device."""

    options: ReadingOptions
    sources: Sequence[Source]
    tokenizer: AnyTokenizer | str | Path | None
    show: Display
    device: torch.device
    _bos: dict[str, str] = field(default_factory=dict)
    _dtypes: dict[str, str] = field(default_factory=dict)

    def models(self) -> Iterator[Model]:
        """Load the models one after another and yield each; drop every reference to a model before
        asking for the next, so that only one is in memory.

        To the name of a model the path is added if an earlier one has the same name, as two runs of
        a preset do. The description of BOS and the dtype of each model are kept for the page.

        Raises:
            WakefulError: a model cannot be loaded, none is named, or one is named twice.
        """
        sources, options = self.sources, self.options
        if not sources:
            raise WakefulError(f"name a model: {SOURCES}")
        if self.tokenizer is not None and len(sources) > 1:
            raise WakefulError("one tokenizer is given for several models: load each with its own")
        names = [source for source in sources if isinstance(source, str | Path)]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise WakefulError(f"{name} is named twice: name each model once")
        for name in names:  # a wrong name raises before the first model is measured
            _ = locate_model(name)
        for source in sources:
            self.show.note(f"loading {source_name(source)}")
            model = load(
                source, tokenizer=self.tokenizer, device=self.device, dtype=options.dtype,
                trust_remote_code=options.trust_remote_code,
            )  # fmt: skip
            # `_bos` has an entry for each model so far.
            if isinstance(source, str | Path) and model.name in self._bos:
                model = dataclasses.replace(model, name=f"{model.name} ({source})")
            if model.name in self._bos:
                raise WakefulError(f"two models are called {model.name!r}; rename one")
            self._bos[model.name] = describe_bos(model, options.bos)
            self._dtypes[model.name] = dtype_name(model)
            yield model
            del model

    @property
    def machine(self) -> Environment:
        """The machine that the models run on."""
        return environment(self.device)

    @property
    def bos(self) -> str:
        """Description of BOS for the page."""
        return same_or_each(self._bos)

    @property
    def dtype(self) -> str:
        """Type of the models' arithmetic, for the page."""
        return same_or_each(self._dtypes)

    def keep(self, result: Result) -> None:
        """Write the result to the folder that the options name, if any."""
        if self.options.out:
            result.save(self.options.out)


@contextlib.contextmanager
def open_session(
    verb: str,
    options: ReadingOptions,
    sources: Sequence[Source],
    tokenizer: AnyTokenizer | str | Path | None,
    display: DisplayFactory | None,
) -> Iterator[Session]:
    """Open the session of the tool `verb`. Within it modules in memory are in evaluation mode, and
    Transformers shows no progress bars of its own.

    Raises:
        WakefulError: the output folder exists, or the device does not.
    """
    modules = modules_in_memory(sources)
    with evaluating(*modules), disable_progress_bars(), (display or default_display)(verb) as show:
        if options.out:
            Run(options.out).refuse_existing(verb)
        yield Session(options, sources, tokenizer, show, choose_device(options.device))


def count_progress(
    show: Display, name: str, model: Model, *, tokens: int, passes: float = 1.0
) -> Callable[[int, int], None]:
    """Return a callback (done, total) that shows the progress of the work `name` in units, each of
    `passes` forward passes over `tokens` tokens.

    Called with 0 done, it also estimates the total time (`note_duration`).
    """

    def on_progress(done: int, total: int) -> None:
        if done == 0:
            note_duration(show, name, model, tokens=tokens, total=total, passes=passes)
        show.count(name, done, total)

    return on_progress


def note_duration(
    show: Display, name: str, model: Model, *, tokens: int, total: int, passes: float
) -> None:
    """Show an estimate of the time that work takes on a model, if it is at least 30 s.

    The work is `total` units of `passes` forward passes over `tokens` tokens.
    """
    num_parameters = sum(parameter.numel() for parameter in model.module.parameters())
    # A forward pass takes about two operations a parameter and token.
    seconds = estimate_seconds(2 * num_parameters * tokens * total * passes, model.device)
    if seconds >= LONG_SECONDS:
        show.note(
            f"{name}: {total:,} of {tokens:,} tokens, {num_parameters / 1e6:,.1f}M parameters; "
            f"very roughly {format_duration(seconds)} on this machine"
        )


def choose_data(model: Model, options: ReadingOptions, data: EvaluationData) -> EvaluationData:
    """Return the evaluation data for a model: `data`, unless it is just the default text and the
    model was trained on a task; then that task.
    """
    # An empty `source` means that the options ask for something else than a text.
    is_default_text = not options.text and options.source
    if not is_default_text:
        return data
    return training_task(model) or data


def describe_bos(model: Model, bos: str) -> str:
    """Return words for the page on whether BOS precedes every sequence that a model reads, by the
    option `bos`: "auto" (as its tokenizer does), "on" or "off".
    """
    place = "before every sequence" if model.starts_with_bos(bos) else "none"  # pyright: ignore
    return f"{place}, as its tokenizer does" if bos == "auto" else place
