"""Optional TensorBoard events beside metrics.jsonl."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from wakeful.errors import WakefulError

Write = Callable[[Mapping[str, Any]], None]
_NO_FIGURES = ("kind", "step", "tokens", "seconds", "num_windows", "num_tokens")


def check_installed(*, enabled: bool) -> None:
    """Raise `WakefulError` if events are wanted and the package is missing."""
    if enabled:
        _summary_writer()


def scalar_writer(path: Path, *, enabled: bool, first: int) -> Write:
    """Return a function that writes a metrics row as TensorBoard scalars, or one that does not.

    Events from step `first` on, left by a run that was interrupted, are told to be dropped.
    """
    if not enabled:
        return lambda row: None
    writer = _summary_writer()(str(path / "tensorboard"), purge_step=first)

    def write(row: Mapping[str, Any]) -> None:
        for name, value in row.items():
            if name not in _NO_FIGURES and value is not None:
                writer.add_scalar(f"{row['kind']}/{name}", value, row["step"])
        writer.flush()

    return write


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
    except ImportError:
        raise WakefulError(
            "train.tensorboard needs the package tensorboard: pip install 'wakeful[tensorboard]'"
        ) from None
    return SummaryWriter
