"""The data of a run: the questions that every kind answers, one file per kind."""

from collections.abc import Sequence
from typing import Any

from wakeful.config.schema import Config, DataConfig
from wakeful.data.order import Batches, Tokens, ValidationWindows
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError


class Data:
    """Tokens that a run is trained and validated on.

    A kind of data sets the fields, states its `place`, and overrides the answers that differ.
    """

    info: dict[str, Any]
    """The facts in `data.json`: where it comes from, and the hashes that name it."""
    train: Tokens
    validation: Tokens
    tokenizer: Tokenizer
    batches_type: type[Batches] = Batches

    @property
    def prepared_source(self) -> str:
        """Return the source that gives the same tokens again, with nothing left to prepare."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        return self.info["tokenizer"]["vocab_size"]

    @property
    def corpus_sha256(self) -> str:
        """Return the hash of the text that was read, of the training source where there are two."""
        return self.info["corpora_sha256"][0]

    @property
    def parts(self) -> Sequence["Data"]:
        """Return the parts of a mixture; anything else is its only part."""
        return [self]

    def batches(self, config: Config, *, rank: int = 0, world_size: int = 1) -> Batches:
        """Return a process's training batches; raise what `Batches` and `first` raise."""
        data, train = config.data, config.train
        return self.batches_type(
            self.first(data, train.length) if data.max_tokens else self.train,
            length=train.length, batch_size=train.batch_size, seed=train.seed, rank=rank,
            world_size=world_size, bos=self.begin(data),
            first=data.first_batch,
        )  # fmt: skip

    def windows(self, config: Config) -> ValidationWindows:
        """Return the validation set as the run evaluates it."""
        train = config.train
        return ValidationWindows(
            self.validation, length=train.length, batch_size=train.eval_batch_size,
            bos=self.begin(config.data),
        )  # fmt: skip

    def begin(self, config: DataConfig) -> int | None:
        """Return the token that every window begins with, and None where it is the text's own."""
        return self.tokenizer.begin if config.bos else None

    def first(self, config: DataConfig, length: int) -> Tokens:
        """Return the first `max_tokens` training tokens for sequences of `length`, or refuse."""
        raise WakefulError(
            f"data.max_tokens = {config.max_tokens} is for one text: {config.source!r} has no "
            "first tokens; leave it out"
        )

    def is_named_by(self, source: str) -> bool:
        """Return whether a source names tokens prepared before, rather than text or a task."""
        return False

    def check(self, config: DataConfig) -> None:
        """Raise `WakefulError` where a field asks prepared data for what it was not prepared with.

        A field that is left at its default asks for nothing. Neither do fields whose default is a
        size or a share: nobody can say who has set them.
        """

    @property
    def warning(self) -> str:
        """Warning about these data that a user reads first; "" for none."""
        return ""

    def settled(self, config: DataConfig) -> DataConfig:
        """Return the fields that decided how data was prepared as they were then."""
        return config
