"""Optional copies of metrics.jsonl's rows: TensorBoard events, runs of W&B and of trackio."""

import contextlib
import hashlib
import importlib
import os
import sys
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
        _imported("wandb")
    if config.train.trackio:
        _imported("trackio")


@contextlib.contextmanager
def event_writer(config: Config, run: Run, *, enabled: bool, first: int) -> Iterator[Write]:
    """Give a function that copies a metrics row to wherever the configuration says.

    What an interrupted run left from step `first` on is there once: TensorBoard is told to drop it,
    Weights & Biases keeps the first of each step. There the run is called as here, in the project
    $WANDB_PROJECT or "wakeful"; it is found again when resumed, and $WANDB_MODE=offline keeps it in
    the run directory. Trackio keeps both rows of a step, in $TRACKIO_DIR; its project is
    $TRACKIO_PROJECT or "wakeful", and the run's name ends with what finds it again.
    """
    writers: list[Write] = []
    with contextlib.ExitStack() as stack:
        if enabled and config.train.tensorboard:
            writers.append(_to_tensorboard(run, first))
        if enabled and config.train.wandb:
            writers.append(_to_wandb(config, run, stack))
        if enabled and config.train.trackio:
            writers.append(_to_trackio(config, run, stack))

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
    wandb = _imported("wandb")
    try:
        session = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "wakeful"),
            name=config.name,
            id=_identity(config, run),
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


def _to_trackio(config: Config, run: Run, stack: contextlib.ExitStack) -> Write:
    session = stack.enter_context(_trackio_session(config, run))
    return lambda row: session.log(_scalars(row), step=row["step"])


@contextlib.contextmanager
def _trackio_session(config: Config, run: Run) -> Iterator[Any]:
    """Begin a run of trackio and end it; what the package says goes where messages go."""
    with contextlib.redirect_stdout(sys.stderr):
        session = _imported("trackio").init(
            project=os.environ.get("TRACKIO_PROJECT", "wakeful"),
            name=f"{config.name}-{_identity(config, run)}",
            resume="allow",
            config=config_to_table(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
    try:
        yield session
    finally:
        with contextlib.redirect_stdout(sys.stderr):
            session.finish()


def _identity(config: Config, run: Run) -> str:
    """Return what tells a run from all others, and stays when it is resumed."""
    born = f"{run.header.created} {config.name} {config.train.seed}"
    return hashlib.sha256(born.encode()).hexdigest()[:16]


def _scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a row's figures to draw, each named after the row's kind."""
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


def _imported(package: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError:
        raise WakefulError(
            f"train.{package} needs the package {package}: pip install 'wakeful[{package}]'"
        ) from None
