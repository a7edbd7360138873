"""Optional TensorBoard events beside metrics.jsonl."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from wakeful.errors import WakefulError

_FIGURES = ("loss", "lr", "grad_norm", "tokens_per_second")


def scalar_writer(path: Path, *, enabled: bool) -> Callable[[Mapping[str, Any]], None]:
    """Return a function that writes a metrics row as TensorBoard scalars, or one that does not."""
    if not enabled:
        return lambda row: None
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
    except ImportError:
        raise WakefulError(
            "train.tensorboard needs the package tensorboard: pip install 'wakeful[tensorboard]'"
        ) from None
    writer = SummaryWriter(str(path / "tensorboard"))

    def write(row: Mapping[str, Any]) -> None:
        for name in _FIGURES:
            if name in row:
                writer.add_scalar(f"{row['kind']}/{name}", row[name], row["step"])
        writer.flush()

    return write
