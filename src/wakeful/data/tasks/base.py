"""Tasks, which replace a text: their windows are drawn when they are read."""

import functools
import os
import re
from abc import abstractmethod

import numpy as np
import tokenizers
from tokenizers import decoders, models

from wakeful.config.schema import DataConfig
from wakeful.data.base import Data
from wakeful.data.order import Tokens, derive_key, mix64
from wakeful.data.sources import HUB_PREFIX, MIXTURE
from wakeful.data.tokenizer import Tokenizer
from wakeful.data.tokens import SPLITS, SplitName
from wakeful.digests import joined_sha256
from wakeful.errors import WakefulError
from wakeful.paths import expand_home
from wakeful.variants import Variant, build, variants_by_name

BOS_TOKEN = "<bos>"
BOS_ID = 0
ENDLESS = 2**62
"""Number of positions at which a training window may begin."""
VALIDATION_TOKENS = 2**14
"""Tokens predicted in validation: the same windows for every run, whatever its seed."""
_GOLDEN = 0x9E3779B97F4A7C15
_EXPRESSION = re.compile(r"\s*([^\W\d][\w.]*(?::[^\W\d]\w*)?)\s*(\(.*\))?\s*", re.DOTALL)


class Task(Variant):
    """A random process that tokens are drawn from, whose probabilities are known.

    Tokens are ids of the `characters`, counted from 1, after BOS, 0, which every window begins
    with. A subclass states `examples`, keeps its options under their names, and defines the rest.
    """

    @property
    @abstractmethod
    def characters(self) -> str:
        """The vocabulary; the id of a character is its place, counted from 1."""

    @property
    @abstractmethod
    def sha256(self) -> str:
        """The process's name: the hash of everything its probabilities depend on."""

    @abstractmethod
    def draw_windows(self, numbers: np.ndarray) -> np.ndarray:
        """Draw windows of tokens, (n, L) int64, from uniform random `numbers`, (n, L) uint64.

        Every window begins with BOS, so the first number of each row is not used.
        """

    @abstractmethod
    def losses(self, rows: np.ndarray) -> np.ndarray:
        """Return −ln p of each token of `rows` (n, L + 1) except the first: (n, L), in nats."""

    @abstractmethod
    def is_trigger(self, rows: np.ndarray) -> np.ndarray:
        """Return a mask, of the shape of `rows`, of tokens after which the next one depends on
        earlier tokens too.
        """

    def tokenizer(self) -> Tokenizer:
        """Return a tokenizer whose tokens are single characters; it drops unknown characters."""
        ids = {BOS_TOKEN: BOS_ID} | {
            character: i for i, character in enumerate(self.characters, start=1)
        }
        inner = tokenizers.Tokenizer(models.BPE(ids, []))
        inner.decoder = decoders.Fuse()
        return Tokenizer(inner, end_of_text=BOS_TOKEN).with_bos()


class TaskStream(Tokens):
    """Tokens of a task, drawn when they are read: a window depends only on its start."""

    end_of_text = BOS_ID

    def __init__(self, task: Task, split: SplitName) -> None:
        self.task = task
        self.vocab_size = len(task.characters) + 1
        self.num_tokens = ENDLESS if split == "train" else VALIDATION_TOKENS + 1
        self._key = derive_key(f"task {split}")

    def read(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Draw the window of `count` tokens of each start, (starts, count), the same on every
        machine.

        Its random numbers are those of SplitMix64 with a seed mixed from the start and the split.
        """
        seeds = mix64(np.asarray(starts).astype(np.uint64), self._key)
        steps = np.arange(count, dtype=np.uint64) * np.uint64(_GOLDEN)
        return self.task.draw_windows(mix64(seeds[:, None] + steps, _GOLDEN))

    def optimal_losses(self, rows: np.ndarray) -> np.ndarray:
        return self.task.losses(rows)

    def is_trigger(self, rows: np.ndarray) -> np.ndarray:
        return self.task.is_trigger(rows)


class TaskData(Data):
    """A task that is used like prepared text; nothing is stored on disk."""

    def __init__(self, task: Task) -> None:
        """Give a task the fields of prepared data."""
        self.task = task
        self.tokenizer = task.tokenizer()
        self.train, self.validation = (TaskStream(task, split) for split in SPLITS)
        tokens = {"train": 0, "validation": VALIDATION_TOKENS + 1}  # 0: training has no end
        self.info = {
            "source": [str(task)],
            "corpora_sha256": [task.sha256],
            "tokenizer": {"vocab_size": self.tokenizer.vocab_size, "end_of_text": BOS_ID},
            "splits": {
                split: {"tokens": number, "sha256": joined_sha256(task.sha256, split, number)}
                for split, number in tokens.items()
            },
            "overlap": {"documents": 0, "tokens": 0},
        }

    @property
    def prepared_source(self) -> str:
        return str(self.task)

    def window_bos(self, config: DataConfig) -> int:
        return BOS_ID

    def check_config(self, config: DataConfig) -> None:
        """Raise `WakefulError` for a field that has no meaning for a task."""
        for name in ("validation_source", "max_bytes", "max_tokens", "keep_overlap", "tokenizer"):
            if getattr(config, name):
                raise WakefulError(
                    f"data.{name} = {getattr(config, name)!r} does nothing: data.source = "
                    f"{config.source!r} is a task, which has its own; leave it out"
                )


def task_of(source: str, *, imports: bool = False) -> Task | None:
    """Return the task that a source such as "backcopy" or "backcopy(triggers=2)" names; None for a
    source of text.

    A source that is not a known task's name is text if such a file exists, or if it is neither a
    call nor of the form MODULE:NAME. `imports` allows importing the task's module.
    """
    match = _EXPRESSION.fullmatch(source)
    if match is None or source.startswith(HUB_PREFIX) or match[1] == MIXTURE:
        return None
    is_task = match[1] in variants_by_name("data.tasks")
    is_file = os.path.exists(expand_home(source))
    if not is_task and (is_file or (not match[2] and ":" not in match[1])):
        return None
    return _build_task(source, imports)


@functools.cache
def _build_task(source: str, imports: bool) -> Task:
    return build("data.tasks", source, imports=imports)
