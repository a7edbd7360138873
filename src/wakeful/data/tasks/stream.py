"""Data of a task, which replace a text: windows are drawn when they are read."""

import numpy as np

from wakeful.config.schema import DataConfig
from wakeful.data.base import Data
from wakeful.data.order import Tokens, derive_key, mix64
from wakeful.data.tasks.backcopy import BOS_ID, Backcopy
from wakeful.data.tokens import SPLITS, SplitName
from wakeful.digests import joined_sha256
from wakeful.errors import WakefulError

ENDLESS = 2**62
"""Number of positions at which a training window may begin."""
VALIDATION_TOKENS = 2**14
"""Tokens predicted in validation: the same windows for every run, whatever its seed."""
_GOLDEN = 0x9E3779B97F4A7C15


class TaskStream(Tokens):
    """Tokens of a task, drawn when they are read: a window depends only on its start."""

    end_of_text = BOS_ID

    def __init__(self, task: Backcopy, split: SplitName) -> None:
        """Define the tokens of one split; those of the training split practically never end."""
        self.task = task
        self.vocab_size = len(task.characters) + 1
        self.num_tokens = ENDLESS if split == "train" else VALIDATION_TOKENS + 1
        self._key = derive_key(f"task {split}")

    def read(self, starts: np.ndarray, count: int) -> np.ndarray:
        """Draw for each start a window of `count` tokens: (starts, count), the same on every
        machine.

        A window's random numbers are those of SplitMix64, whose seed is mixed from the start and
        the split.
        """
        seeds = mix64(np.asarray(starts).astype(np.uint64), self._key)
        # For each number SplitMix64 adds _GOLDEN to its state, then mixes it.
        steps = np.arange(count, dtype=np.uint64) * np.uint64(_GOLDEN)
        return self.task.draw_windows(mix64(seeds[:, None] + steps, _GOLDEN))

    def optimal_losses(self, rows: np.ndarray) -> np.ndarray:
        return self.task.losses(rows)

    def is_trigger(self, rows: np.ndarray) -> np.ndarray:
        return self.task.is_trigger(rows)


class TaskData(Data):
    """A task that is used like prepared text; nothing is stored on disk."""

    def __init__(self, task: Backcopy) -> None:
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
        """Raise `WakefulError` if `config` sets a field that has no meaning for a task."""
        for name in ("validation_source", "max_bytes", "max_tokens", "keep_overlap", "tokenizer"):
            if getattr(config, name):
                raise WakefulError(
                    f"data.{name} = {getattr(config, name)!r} does nothing: data.source = "
                    f"{config.source!r} is a task, which has its own; leave it out"
                )
