"""Optional copies of metrics.jsonl's rows: TensorBoard events, runs of W&B and of trackio."""

import contextlib
import hashlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

from wakeful.config.schema import Config, config_to_table
from wakeful.errors import WakefulError
from wakeful.runs.run import Run
from wakeful.variants.plugins import import_optional

Write = Callable[[Mapping[str, Any]], None]
_COUNTS = ("kind", "step", "tokens", "seconds", "num_windows", "num_tokens")
"""Fields of a row that nobody draws a curve of."""


def check_packages(config: Config) -> dict[str, Any]:
    """Return the packages, by name, that write the copies that are wanted; refuse missing ones."""
    return {
        name: import_optional(name, extra=name, wants=f"train.{name}", module=module)
        for name, (module, _) in _PACKAGES.items()
        if getattr(config.train, name)
    }


@contextlib.contextmanager
def event_writer(config: Config, run: Run, *, enabled: bool, first: int) -> Iterator[Write]:
    """Give a function that copies a metrics row to wherever the configuration says.

    What an interrupted run left from step `first` on is there once: TensorBoard drops it,
    Weights & Biases keeps the first of each step. There the run is called as here, in the project
    $WANDB_PROJECT or "wakeful"; it is found again when resumed, and $WANDB_MODE=offline keeps it in
    the run directory. Trackio keeps both rows of a step, in $TRACKIO_DIR; its project is
    $TRACKIO_PROJECT or "wakeful", and the run's name ends with what finds it again.
    """
    packages = check_packages(config) if enabled else {}
    with ExitStack() as stack:
        logs = [_PACKAGES[name][1](packages[name], config, run, first, stack) for name in packages]

        def write(row: Mapping[str, Any]) -> None:
            for log in logs:
                log(_scalars(row), step=row["step"])

        yield write


def _to_tensorboard(
    tensorboard: Any, config: Config, run: Run, first: int, stack: ExitStack
) -> Callable[..., None]:
    writer = tensorboard.SummaryWriter(str(run.path / "tensorboard"), purge_step=first)

    def log(scalars: dict[str, float], *, step: int) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log


def _log_to_wandb(
    wandb: Any, config: Config, run: Run, first: int, stack: ExitStack
) -> Callable[..., None]:
    """Start a Weights & Biases session and return its `log`; `stack` ends it."""
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
    return session.log


def _log_to_trackio(
    trackio: Any, config: Config, run: Run, first: int, stack: ExitStack
) -> Callable[..., None]:
    """Start a trackio session and return its `log`; `stack` ends it."""
    # What the package says goes where messages go.
    with contextlib.redirect_stdout(sys.stderr):
        session = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", "wakeful"),
            name=f"{config.name}-{_identity(config, run)}",
            resume="allow",
            config=config_to_table(config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    @stack.callback
    def end() -> None:
        with contextlib.redirect_stdout(sys.stderr):
            session.finish()

    return session.log


_PACKAGES: Mapping[str, tuple[str, Callable[..., Callable[..., None]]]] = {
    "tensorboard": ("torch.utils.tensorboard", _to_tensorboard),
    "wandb": ("wandb", _log_to_wandb),
    "trackio": ("trackio", _log_to_trackio),
}
"""By the name of the package: the module, and what begins to write to it."""


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
