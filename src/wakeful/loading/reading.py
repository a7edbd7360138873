"""Words for models to read: the beginning of a text, or the validation windows of a task."""

import dataclasses
import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from wakeful.data.sources import Beginning, beginning_of
from wakeful.data.tasks import TaskData, task_of
from wakeful.data.tasks.base import BOS_ID, VALIDATION_TOKENS, Task
from wakeful.errors import WakefulError
from wakeful.loading.model import Model
from wakeful.model.decoder import IGNORED
from wakeful.runs.run import run_at
from wakeful.scores import Score


@dataclass(frozen=True)
class Window:
    """Some inputs, and which of the tokens after them are counted here."""

    inputs: list[int]
    targets: list[int]
    """As many; −100 where another window counts the token."""
    first: int
    """The place in x of the first counted target."""
    num_bytes: float = 0.0
    """UTF-8 bytes of text that the counted targets stand for; 0 where nobody knows."""

    @property
    def counted(self) -> int:
        """How many targets are counted here."""
        return sum(target != IGNORED for target in self.targets)


class Words(ABC):
    """Words for models to read."""

    name: str = ""
    """Its name on a page; empty where that is its source."""

    @property
    @abstractmethod
    def sha256(self) -> str:
        """The hash of the part that has been read."""

    @abstractmethod
    def sequences(
        self, loaded: Model, *, length: int, num_sequences: int, bos: bool
    ) -> list[list[int]]:
        """Return the first sequences of `length` tokens, each begun with BOS if asked.

        Raises:
            WakefulError: there are fewer, the length is past the model's context, or the model
                cannot read them.
        """

    @abstractmethod
    def windows(
        self, loaded: Model, *, length: int, stride: int, num_sequences: int, bos: bool
    ) -> list[Window]:
        """Return the first windows for perplexity, at most `num_sequences`; 0 is all.

        Raises:
            WakefulError: there are none, or the model cannot read them.
        """

    @abstractmethod
    def scores(self, nats: Score, cut: list[Window]) -> list[Score]:
        """Return the scores that the `nats` of the windows give beside the perplexity."""


class TextWords(Words):
    """A text's beginning, and how sequences are cut from it."""

    def __init__(self, beginning: Beginning) -> None:
        self.beginning = beginning

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.beginning.text.encode()).hexdigest()

    def sequences(
        self, loaded: Model, *, length: int, num_sequences: int, bos: bool
    ) -> list[list[int]]:
        check_length(loaded, length, bos=bos)
        take = length - bos
        tokens = self.beginning.tokens(loaded.plain, take * num_sequences)
        if len(tokens) < take * num_sequences:
            raise WakefulError(
                f"{num_sequences} sequences of {length} tokens need {take * num_sequences} tokens, "
                f"and the text has {len(tokens)} of {loaded.name}'s: give more text, or ask for "
                "fewer or shorter sequences"
            )
        first = [loaded.bos] if bos and loaded.bos is not None else []
        return [first + tokens[n * take : (n + 1) * take] for n in range(num_sequences)]

    def windows(
        self, loaded: Model, *, length: int, stride: int, num_sequences: int, bos: bool
    ) -> list[Window]:
        text = self.beginning.text_of(loaded.plain, length * num_sequences)
        tokens, ends = tokenize(loaded, text)
        if len(tokens) < 2:
            raise WakefulError(
                f"the text has {len(tokens)} of {loaded.name}'s tokens; at least 2 are needed"
            )
        stream = [loaded.bos, *tokens] if bos and loaded.bos is not None else tokens
        cut = stream_windows(stream, length=length, stride=stride, bos=bos)
        cut = cut[:num_sequences] if num_sequences else cut
        if ends is None:
            return cut
        places = [(each, each.first - bos) for each in cut]
        return [
            dataclasses.replace(each, num_bytes=float(ends[first + each.counted] - ends[first]))
            for each, first in places
        ]

    def scores(self, nats: Score, cut: list[Window]) -> list[Score]:
        sizes = np.array([each.num_bytes for each in cut])
        if not sizes.sum():
            return []
        bits = dataclasses.replace(
            nats, metric="bits per byte", values=nats.values / math.log(2), weights=sizes,
            exponential=False,
        )  # fmt: skip
        return [bits]


class TaskWords(Words):
    """The validation windows of a task, those of training with the same length.

    Only models with its tokens read them, and each begins with BOS.
    """

    def __init__(self, task: Task) -> None:
        self.task = task
        self.name = f"{task}, validation"

    @property
    def sha256(self) -> str:
        return self.task.sha256

    def sequences(
        self, loaded: Model, *, length: int, num_sequences: int, bos: bool, targets: int = 0
    ) -> list[list[int]]:
        """Return the first sequences, each with so many `targets` behind its `length` tokens."""
        task = self.task
        ids = [[number] for number in range(1, len(task.characters) + 1)]
        if loaded.bos != BOS_ID or [*map(loaded.plain, task.characters)] != ids:
            raise WakefulError(
                f"{loaded.name} does not have the tokens of {task}: a task is read by models that "
                "were trained on it"
            )
        if not bos:
            raise WakefulError(f"every window of {task} begins with BOS; leave out --bos off")
        check_length(loaded, length, bos=bos)
        if num_sequences * length > VALIDATION_TOKENS:
            raise WakefulError(
                f"{num_sequences} windows of {length} tokens are more than the "
                f"{VALIDATION_TOKENS:,} that {task} is validated on: ask for fewer, or for shorter "
                "ones"
            )
        starts = np.arange(num_sequences) * length
        return TaskData(task).validation.read(starts, length + targets).tolist()

    def windows(
        self, loaded: Model, *, length: int, stride: int, num_sequences: int, bos: bool
    ) -> list[Window]:
        if stride != length:
            raise WakefulError(
                f"stride = {stride}: the windows of {self.task} stand alone; leave it out"
            )
        most = VALIDATION_TOKENS // length
        number = min(num_sequences or most, most)
        rows = self.sequences(loaded, length=length, num_sequences=number, bos=bos, targets=1)
        return [Window(row[:-1], row[1:], 1) for row in rows]

    def scores(self, nats: Score, cut: list[Window]) -> list[Score]:
        rows = np.array([[*window.inputs, window.targets[-1]] for window in cut])
        over = dataclasses.replace(
            nats, metric="loss over the task's own", exponential=False,
            values=nats.values - self.task.losses(rows).sum(1),
        )  # fmt: skip
        return [over]


def words_of(source: str, num_tokens: int) -> Words:
    """Return the task that a source names, or a text read as far as `enough` tokens mostly need.

    Raises:
        WakefulError: what `task_of` and `beginning_of` raise.
    """
    task = task_of(source, imports=True)
    return TextWords(beginning_of(source, num_tokens)) if task is None else TaskWords(task)


def words_in(text: str | Words) -> Words:
    """Return a text at hand as words; words stay as they are."""
    return TextWords(Beginning(text)) if isinstance(text, str) else text


def own_task(loaded: Model) -> Words | None:
    """Return the task that a run was trained on; None of other models.

    Raises:
        WakefulError: the task is of a module that nobody has imported.
    """
    run = run_at(loaded.path)
    if run is None or run.header.kind != "train":
        return None
    with run.naming_modules():
        task = task_of(run.config.data.source)
    return None if task is None else TaskWords(task)


def check_length(loaded: Model, length: int, *, bos: bool) -> None:
    """Raise `WakefulError` where a model cannot read that many tokens, or begin them with BOS."""
    if length < 2:
        raise WakefulError(f"length = {length}: what a model reads needs at least 2 tokens")
    if length > loaded.context:
        raise WakefulError(
            f"length = {length} must be between 2 and {loaded.name}'s context of {loaded.context} "
            "tokens"
        )
    if bos and loaded.bos is None:
        raise WakefulError(f"{loaded.name} has no BOS token; leave out --bos")


def tokenize(loaded: Model, text: str) -> tuple[list[int], list[int] | None]:
    """Encode a text whole; return its tokens, and how many of its UTF-8 bytes the first 0, 1, 2 …
    tokens stand for, the last for what is left, or None where the tokenizer does not tell.
    """
    tokens, ends = loaded.plain_with_ends(text)
    if ends is None:
        return tokens, None
    points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    sizes = 1 + (points >= 0x80) + (points >= 0x800) + (points >= 0x10000)
    bytes_before = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])
    # An end may lie before its left neighbor's where one character is several tokens.
    found = np.maximum.accumulate(bytes_before[np.asarray(ends, dtype=np.int64)])
    return tokens, [0, *found[:-1].tolist(), int(bytes_before[-1])]


def stream_windows(stream: list[int], *, length: int, stride: int, bos: bool) -> list[Window]:
    """Cut x into windows; with `bos`, x[0] is BOS and stands first in every window."""
    cut: list[Window] = []
    counted = 1
    start = 0
    while counted < len(stream):
        inputs = stream[start : start + length]
        targets = stream[start + 1 : start + length + 1]
        inputs = inputs[: len(targets)]
        if bos:
            inputs[0] = stream[0]
        seen = counted - start - 1
        targets = [IGNORED] * seen + targets[seen:]
        cut.append(Window(inputs, targets, counted))
        counted = start + len(targets) + 1
        start += stride
    return cut
