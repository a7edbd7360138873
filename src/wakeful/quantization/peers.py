"""Other quantized versions of a model, whose losses are measured beside the mixed model's."""

from collections.abc import Sequence
from dataclasses import dataclass

from wakeful.errors import WakefulError, did_you_mean_path
from wakeful.loading.load import locate_model
from wakeful.quantization.measure import Totals


@dataclass(frozen=True)
class Peer:
    """A quantized model in a folder or file, and its losses on the measured text."""

    name: str
    """Its path as the user gave it."""
    bytes: int
    """Bytes of its weights in the files."""
    totals: Totals


def check_peers(sources: Sequence[str]) -> None:
    """Raise `WakefulError` if a source does not exist on this machine, or is named twice."""
    for index, source in enumerate(sources):
        if source in sources[:index]:
            raise WakefulError(f"against names {source} twice: name each model once")
        if locate_model(source).kind == "hub":
            raise WakefulError(
                f"against = {source!r}: there is no such folder or GGUF file"
                f"{did_you_mean_path(source)}; download a model of the hub first"
            )
