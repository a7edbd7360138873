"""The data of a run: the interface that every kind (prepared text, mixture, task) implements."""

from collections.abc import Sequence
from typing import Any

from wakeful.config.schema import Config, DataConfig
from wakeful.data.order import Batches, Tokens, ValidationWindows
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError


class Data:
    """Tokens that a run is trained and validated on.

    A subclass sets the fields, defines `prepared_source`, and overrides the methods that differ.
    """

    info: dict[str, Any]
    """The facts in `data.json`: where it comes from, and the hashes that name it."""
    train: Tokens
    validation: Tokens
    tokenizer: Tokenizer
    batches_type: type[Batches] = Batches

    @property
    def prepared_source(self) -> str:
        """A value of `data.source` that names these tokens without preparing them again."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        return self.info["tokenizer"]["vocab_size"]

    @property
    def corpus_sha256(self) -> str:
        """The hash of the text that was read; of a separate validation source there is another."""
        return self.info["corpora_sha256"][0]

    @property
    def parts(self) -> Sequence["Data"]:
        """The domains of a mixture; for other data, the data itself as the only part."""
        return [self]

    def batches(self, config: Config, *, rank: int = 0, world_size: int = 1) -> Batches:
        """Return the training batches of one process, number `rank` of `world_size`. If
        `data.max_tokens` is set, they hold only that many first tokens.

        Raises:
            WakefulError: the tokens are too few, the data have no first tokens, or the processes
                cannot share a batch.
        """
        data, train = config.data, config.train
        return self.batches_type(
            self.first_tokens(data, train.length) if data.max_tokens else self.train,
            length=train.length, batch_size=train.batch_size, seed=train.seed, rank=rank,
            world_size=world_size, bos=self.window_bos(data), first=data.first_batch,
        )  # fmt: skip

    def windows(self, config: Config) -> ValidationWindows:
        """Return the validation windows, with the length, batch size and BOS that `config` sets."""
        train = config.train
        return ValidationWindows(
            self.validation, length=train.length, batch_size=train.eval_batch_size,
            bos=self.window_bos(config.data),
        )  # fmt: skip

    def window_bos(self, config: DataConfig) -> int | None:
        """Return the token that replaces the first one of every window; None to keep the text."""
        return self.tokenizer.start_token if config.bos else None

    def first_tokens(self, config: DataConfig, length: int) -> Tokens:
        """Return the first `config.max_tokens` training tokens, enough for a sequence of `length`.

        This method always raises `WakefulError`: only the subclass for a single text overrides it.
        """
        raise WakefulError(
            f"data.max_tokens = {config.max_tokens} is for one text: {config.source!r} has no "
            "first tokens; leave it out"
        )

    def check_config(self, config: DataConfig) -> None:
        """Raise `WakefulError` if a field of `config` is set that these data do not read.

        This method accepts every field: subclasses override it. They do not check fields at their
        default, nor fields whose default is a size or a share, because it is unknown whether a user
        set them.
        """
