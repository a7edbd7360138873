"""Evaluation data of a model: the beginning of a text, or the validation windows of a task."""

import dataclasses
import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from wakeful.data.sources import TextBeginning, read_beginning
from wakeful.data.tasks import Backcopy, TaskData, task_of
from wakeful.data.tasks.backcopy import BOS_ID
from wakeful.data.tasks.stream import VALIDATION_TOKENS
from wakeful.errors import WakefulError
from wakeful.loading.model import Model
from wakeful.model.decoder import IGNORED
from wakeful.runs.run import run_at
from wakeful.scores import Score


@dataclass(frozen=True)
class Window:
    """A window of a token stream: inputs and, as targets, the token after each."""

    inputs: list[int]
    targets: list[int]
    """Targets, as many as inputs; −100 where another window counts the token."""
    first_target: int
    """Index in the token stream of the first target that this window counts."""
    num_bytes: float = 0.0
    """UTF-8 bytes of the counted targets; 0 where unknown."""

    @property
    def counted(self) -> int:
        """Number of targets counted in this window."""
        return sum(target != IGNORED for target in self.targets)


class EvaluationData(ABC):
    """Text or task that models are evaluated on."""

    name: str = ""
    """Name in reports; "" where that is the source."""

    @property
    @abstractmethod
    def sha256(self) -> str:
        """SHA-256 of the text that has been read."""

    @abstractmethod
    def sequences(
        self, loaded: Model, *, length: int, num_sequences: int, bos: bool
    ) -> list[list[int]]:
        """Return the first `num_sequences` sequences of `length` tokens, encoded as the model reads
        text. With `bos`, the first of each sequence's `length` tokens is BOS.

        Raises:
            WakefulError: there are fewer, the length exceeds the model's context, or the model
                cannot read them.
        """

    @abstractmethod
    def windows(
        self, loaded: Model, *, length: int, stride: int, num_sequences: int, bos: bool
    ) -> list[Window]:
        """Return the first `num_sequences` windows (0: all) on which a perplexity is computed: of
        `length` inputs each, starting `stride` tokens apart; with `bos` each begins with BOS.

        Raises:
            WakefulError: there are none, or the model cannot read them.
        """

    @abstractmethod
    def scores(self, nats: Score, windows: list[Window]) -> list[Score]:
        """Return further scores, such as bits per byte, from the score `nats`: the loss of each of
        the `windows` in nats.
        """


class EvaluationText(EvaluationData):
    """Beginning of a text, cut into sequences."""

    def __init__(self, beginning: TextBeginning) -> None:
        self.beginning = beginning

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.beginning.text.encode()).hexdigest()

    def sequences(
        self, loaded: Model, *, length: int, num_sequences: int, bos: bool
    ) -> list[list[int]]:
        """Return the first `num_sequences` sequences of `length` tokens of the text, one after
        another, each with BOS in front if `bos`.
        """
        check_readable_length(loaded, length, bos=bos)
        text_length = length - bos  # BOS takes one place
        num_tokens = text_length * num_sequences
        tokens = self.beginning.tokens(loaded.encode_plain, num_tokens)
        if len(tokens) < num_tokens:
            raise WakefulError(
                f"{num_sequences} sequences of {length} tokens need {num_tokens} tokens, "
                f"and the text has {len(tokens)} of {loaded.name}'s: give more text, or ask for "
                "fewer or shorter sequences"
            )
        start = [loaded.bos] if bos and loaded.bos is not None else []
        return [start + tokens[n : n + text_length] for n in range(0, num_tokens, text_length)]

    def windows(
        self, loaded: Model, *, length: int, stride: int, num_sequences: int, bos: bool
    ) -> list[Window]:
        """Return the first `num_sequences` windows of the text (0: all), overlapping where `stride`
        is less than `length`, with the UTF-8 bytes of their counted targets.
        """
        # For 0 tokens, `text_of` returns the whole text.
        text = self.beginning.text_of(loaded.encode_plain, length * num_sequences)
        tokens, byte_ends = tokenize(loaded, text)
        if len(tokens) < 2:
            raise WakefulError(
                f"the text has {len(tokens)} of {loaded.name}'s tokens; at least 2 are needed"
            )
        stream = [loaded.bos, *tokens] if bos and loaded.bos is not None else tokens
        windows = cut_windows(stream, length=length, stride=stride, bos=bos)
        windows = windows[:num_sequences] if num_sequences else windows
        if byte_ends is None:
            return windows
        windows_with_bytes: list[Window] = []
        for window in windows:
            first = window.first_target - bos  # index in the text's tokens: the stream has BOS too
            num_bytes = float(byte_ends[first + window.counted] - byte_ends[first])
            windows_with_bytes.append(dataclasses.replace(window, num_bytes=num_bytes))
        return windows_with_bytes

    def scores(self, nats: Score, windows: list[Window]) -> list[Score]:
        """Return the score in bits per byte; none where the windows' bytes are unknown."""
        sizes = np.array([window.num_bytes for window in windows])
        if not sizes.sum():
            return []
        bits = dataclasses.replace(
            nats, metric="bits per byte", values=nats.values / math.log(2), weights=sizes,
            exponential=False,
        )  # fmt: skip
        return [bits]


class EvaluationTask(EvaluationData):
    """Validation windows of a task, equal to those of training with the same length.

    Every window begins with BOS, and only models with the task's tokens can read them.
    """

    def __init__(self, task: Backcopy) -> None:
        self.task = task
        self.name = f"{task}, validation"

    @property
    def sha256(self) -> str:
        return self.task.sha256

    def sequences(
        self, loaded: Model, *, length: int, num_sequences: int, bos: bool, targets: int = 0
    ) -> list[list[int]]:
        """Return the first `num_sequences` validation sequences of `length` tokens, each with
        `targets` further tokens after it.

        Raises:
            WakefulError: the model does not have the task's tokens, `bos` is False, or there are
                fewer sequences.
        """
        task = self.task
        # After BOS, a task's characters have the ids 1, 2, …
        ids = [[number] for number in range(1, len(task.characters) + 1)]
        if loaded.bos != BOS_ID or [*map(loaded.encode_plain, task.characters)] != ids:
            raise WakefulError(
                f"{loaded.name} does not have the tokens of {task}: a task is read by models that "
                "were trained on it"
            )
        if not bos:
            raise WakefulError(f"every window of {task} begins with BOS; leave out --bos off")
        check_readable_length(loaded, length, bos=bos)
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
        """Return the first `num_sequences` validation windows of the task; 0: all. They do not
        overlap, so `stride` must be `length`.
        """
        if stride != length:
            raise WakefulError(
                f"stride = {stride}: the windows of {self.task} stand alone; leave it out"
            )
        num_windows = VALIDATION_TOKENS // length
        num_windows = min(num_sequences or num_windows, num_windows)
        rows = self.sequences(loaded, length=length, num_sequences=num_windows, bos=bos, targets=1)
        # Each row is a token stream of its own, whose first token is no target.
        return [Window(row[:-1], row[1:], first_target=1) for row in rows]

    def scores(self, nats: Score, windows: list[Window]) -> list[Score]:
        """Return one score, the loss minus that of the task's true distribution on the same tokens,
        in nats per token.
        """
        # Both losses are sums over each window's targets.
        token_rows = np.array([[*window.inputs, window.targets[-1]] for window in windows])
        excess = dataclasses.replace(
            nats, metric="loss over the task's own", exponential=False,
            values=nats.values - self.task.losses(token_rows).sum(1),
        )  # fmt: skip
        return [excess]


def open_evaluation_data(source: str, num_tokens: int) -> EvaluationData:
    """Return evaluation data from a source: a task, if `source` names one, else the beginning of a
    text, at least `num_tokens` tokens long.

    Raises:
        WakefulError: the source is unknown, or cannot be read.
    """
    task = task_of(source)
    if task is not None:
        return EvaluationTask(task)
    return EvaluationText(read_beginning(source, num_tokens))


def as_evaluation_data(text: str | EvaluationData) -> EvaluationData:
    """Return a string as an `EvaluationText`; evaluation data is returned unchanged."""
    return EvaluationText(TextBeginning(text)) if isinstance(text, str) else text


def training_task(loaded: Model) -> EvaluationData | None:
    """Return the task that a run was trained on; None for other models."""
    run = run_at(loaded.path)
    if run is None or run.header.kind != "train":
        return None
    task = task_of(run.config.data.source)
    return None if task is None else EvaluationTask(task)


def check_readable_length(loaded: Model, length: int, *, bos: bool) -> None:
    """Raise `WakefulError` where a model cannot read sequences of `length` tokens, or with `bos`
    has no BOS token to begin them with.
    """
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
    """Encode a text; return its tokens, and a list whose entry n is the number of UTF-8 bytes of
    the first n tokens; the last entry is that of the whole text.

    The list is None where the tokenizer gives no offsets.
    """
    tokens, ends = loaded.encode_plain_with_ends(text)
    if ends is None:
        return tokens, None
    code_points = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
    # UTF-8 takes 1 to 4 bytes for a character.
    num_bytes = 1 + (code_points >= 0x80) + (code_points >= 0x800) + (code_points >= 0x10000)
    # bytes_before[n] is the number of bytes before character n.
    bytes_before = np.concatenate([[0], np.cumsum(num_bytes, dtype=np.int64)])
    # Where one character is several tokens, an end may lie before the previous token's.
    byte_ends = np.maximum.accumulate(bytes_before[np.asarray(ends, dtype=np.int64)])
    # Characters after the last token, such as a final space, count with it.
    return tokens, [0, *byte_ends[:-1].tolist(), int(bytes_before[-1])]


def cut_windows(stream: list[int], *, length: int, stride: int, bos: bool) -> list[Window]:
    """Cut a token stream into windows of `length` inputs, each starting `stride` tokens after the
    one before; the last may be shorter.

    Every target is counted in exactly one window, the first that has it. With `bos`, stream[0] is
    BOS and replaces the first input of every window.
    """
    windows: list[Window] = []
    start = 0
    next_target = 1  # index in the stream of the first target that no window has counted yet
    while next_target < len(stream):
        inputs = stream[start : start + length]
        targets = stream[start + 1 : start + length + 1]
        inputs = inputs[: len(targets)]  # the stream's last token has no target
        if bos:
            inputs[0] = stream[0]
        num_counted_before = next_target - (start + 1)
        targets = [IGNORED] * num_counted_before + targets[num_counted_before:]
        windows.append(Window(inputs, targets, next_target))
        next_target = start + len(targets) + 1
        start += stride
    return windows
