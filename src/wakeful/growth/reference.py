"""The model to inherit from, with what it cost as far as that is known."""

from dataclasses import dataclass
from pathlib import Path

from wakeful.data.tokenizer import Tokenizer
from wakeful.model.decoder import Decoder
from wakeful.run import Run
from wakeful.train.restore import restore


@dataclass(frozen=True)
class Reference:
    """A decoder to inherit from and its tokenizer."""

    name: str
    decoder: Decoder
    tokenizer: Tokenizer
    tokens: int | None
    """Tokens it was trained on; None where its files do not say."""
    seconds: float | None
    """How long that took, in seconds; None where its files do not say."""


def read_reference(source: str) -> Reference:
    """Return the model that `source` names, frozen, in evaluation mode and float32 or better.

    Raises:
        WakefulError: it cannot be found, is damaged, or is no model that our decoder can be.
    """
    run = Run(source)
    if (run.path / "run.json").is_file():
        trained = restore(source, device="cpu")
        last = [row for row in run.metrics() if row["kind"] == "train"][-1:]
        return Reference(
            name=trained.config.name,
            decoder=trained.decoder,
            tokenizer=trained.tokenizer,
            tokens=last[0]["tokens"] if last else None,
            seconds=last[0]["seconds"] if last else None,
        )
    raise NotImplementedError(Path(source))
