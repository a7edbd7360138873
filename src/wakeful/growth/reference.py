"""The model to inherit from, with what it cost as far as that is known."""

from dataclasses import dataclass
from pathlib import Path

from wakeful.data.tokenizer import Tokenizer
from wakeful.hf.weights_in import read_decoder
from wakeful.model.decoder import Decoder
from wakeful.runs.run import Run
from wakeful.training.facts import check_rows


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
    """Return the model that `source` names, in float32, frozen and in evaluation mode.

    Raises:
        WakefulError: it cannot be found, is damaged, has no tokenizer, or is no model that our
            decoder can be.
    """
    imported = read_decoder(source)
    tokens = seconds = None
    if (Path(source) / "run.json").is_file():
        run = Run.open(source)
        check_rows(run)
        trained = [row for row in run.metrics() if row["kind"] == "train"]
        if trained:
            tokens, seconds = trained[-1]["tokens"], trained[-1]["seconds"]
    return Reference(imported.name, imported.decoder, imported.tokenizer, tokens, seconds)
