"""Optional copies of metrics.jsonl's rows: TensorBoard events, a run of Weights & Biases."""

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any

from wakeful.config.schema import Config, config_to_table
from wakeful.errors import WakefulError
from wakeful.runs.run import Run

Write = Callable[[Mapping[str, Any]], None]
_COUNTS = ("kind", "step", "tokens", "seconds", "num_windows", "num_tokens")
"""Fields of a row that nobody draws a curve of."""


def check_installed(config: Config) -> None:
    """Raise `WakefulError` where copies are wanted and the package that writes them is missing."""
    if config.train.tensorboard:
        _summary_writer()
    if config.train.wandb:
        _wandb()


@contextlib.contextmanager
def event_writer(config: Config, run: Run, *, enabled: bool, first: int) -> Iterator[Write]:
    """Give a function that copies a metrics row to wherever the configuration says.

    What an interrupted run left from step `first` on is there once: TensorBoard is told to drop it,
    Weights & Biases keeps the first of each step. There the run is called as here, in the project
    $WANDB_PROJECT or "wakeful"; it is found again when resumed, and $WANDB_MODE=offline keeps it in
    the run directory.
    """
    writers: list[Write] = []
    with contextlib.ExitStack() as stack:
        if enabled and config.train.tensorboard:
            writers.append(_to_tensorboard(run, first))
        if enabled and config.train.wandb:
            writers.append(_to_wandb(config, run, stack))

        def write(row: Mapping[str, Any]) -> None:
            for writer in writers:
                writer(row)

        yield write


def _to_tensorboard(run: Run, first: int) -> Write:
    writer = _summary_writer()(str(run.path / "tensorboard"), purge_step=first)

    def write(row: Mapping[str, Any]) -> None:
        for name, value in _scalars(row).items():
            writer.add_scalar(name, value, row["step"])
        writer.flush()

    return write


def _to_wandb(config: Config, run: Run, stack: contextlib.ExitStack) -> Write:
    born = f"{run.header.created} {config.name} {config.train.seed}"
    wandb = _wandb()
    try:
        session = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "wakeful"),
            name=config.name,
            id=hashlib.sha256(born.encode()).hexdigest()[:16],
            resume="allow",
            dir=str(run.path),
            config=config_to_table(config),
        )
    except wandb.Error as error:
        raise WakefulError(
            f"train.wandb: Weights & Biases cannot be reached ({error}); log in with wandb login, "
            "or set WANDB_MODE=offline"
        ) from None

    def end(kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        session.finish(exit_code=0 if kind is None else 1)

    stack.push(end)
    return lambda row: session.log(_scalars(row), step=row["step"])


def _scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return what a row has to draw, each figure named after the row's kind."""
    return {
        f"{row['kind']}/{name}": value
        for name, value in row.items()
        if name not in _COUNTS and value is not None
    }


def _summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter  # noqa: PLC0415
    except ImportError:
        raise WakefulError(
            "train.tensorboard needs the package tensorboard: pip install 'wakeful[tensorboard]'"
        ) from None
    return SummaryWriter


def _wandb() -> Any:
    try:
        import wandb  # noqa: PLC0415 # pyright: ignore[reportMissingImports]
    except ImportError:
        raise WakefulError(
            "train.wandb needs the package wandb: pip install 'wakeful[wandb]'"
        ) from None
    return wandb
