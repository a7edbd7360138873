"""Quantized models of other tools, whose losses are measured beside the mixed model's."""

from dataclasses import dataclass
from pathlib import Path

from wakeful.errors import WakefulError
from wakeful.loading.load import locate_model
from wakeful.quantization.measure import Totals


@dataclass(frozen=True)
class Peer:
    """A quantized model in a folder or file, and its losses on the measured text."""

    name: str
    """Its path as the user gave it."""
    bytes: int
    """Bytes of the files of its weights."""
    totals: Totals


def weight_file_bytes(source: str | Path) -> int:
    """Return the bytes of the files that hold the weights of a GGUF file or Transformers folder.

    Raises:
        WakefulError: it is neither, or the folder has no weights.
    """
    location = locate_model(source)
    if location.kind == "gguf":
        return location.path.stat().st_size
    if location.kind in ("run", "hub"):
        raise WakefulError(f"against = {str(source)!r}: name a Transformers folder or a GGUF file")
    for pattern in ("*.safetensors", "*.bin"):  # the second only where there is none of the first
        if size := sum(file.stat().st_size for file in location.path.glob(pattern)):
            return size
    raise WakefulError(f"against = {str(source)!r}: the folder has no weights")
