"""Optional copies of metrics.jsonl's rows: TensorBoard events and runs of W&B."""

import contextlib
import hashlib
import os
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


def import_trackers(config: Config) -> dict[str, Any]:
    """Import the trackers that `config.train` turns on, such as wandb; return their modules by
    name.

    Raises:
        WakefulError: one is not installed.
    """
    return {
        name: import_optional(name, extra=name, wants=f"train.{name}", module=module)
        for name, (module, _) in _PACKAGES.items()
        if getattr(config.train, name)
    }


@contextlib.contextmanager
def event_writer(config: Config, run: Run, *, enabled: bool, first: int) -> Iterator[Write]:
    """Yield a function that copies a row of metrics to the configuration's trackers; without
    `enabled` it does nothing.

    A resumed run continues the tracker's run. `first` is the first step to be logged now. If the
    run was interrupted after later steps, TensorBoard drops their old rows; Weights & Biases keeps
    them and drops the new ones.

    In Weights & Biases the run has its own name, in the project $WANDB_PROJECT or "wakeful"
    ($WANDB_MODE=offline keeps it in the run directory).
    """
    modules = import_trackers(config) if enabled else {}
    with ExitStack() as stack:  # ends the trackers' sessions
        logs: list[Callable[..., None]] = []
        for name, module in modules.items():
            _, start_session = _PACKAGES[name]
            logs.append(start_session(module, config, run, first, stack))

        def write(row: Mapping[str, Any]) -> None:
            for log in logs:
                log(_scalars(row), step=row["step"])

        yield write


def _log_to_tensorboard(
    tensorboard: Any, config: Config, run: Run, first: int, stack: ExitStack
) -> Callable[..., None]:
    """Return a function that writes a step's figures as TensorBoard events into the run directory.

    TensorBoard hides the events from step `first` on that an interrupted run has written before.
    `config` and `stack` are for other trackers.
    """
    writer = tensorboard.SummaryWriter(str(run.path / "tensorboard"), purge_step=first)

    def log(scalars: dict[str, float], *, step: int) -> None:
        for name, value in scalars.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    return log


def _log_to_wandb(
    wandb: Any, config: Config, run: Run, first: int, stack: ExitStack
) -> Callable[..., None]:
    """Start a Weights & Biases session, or continue that of a resumed run; return its function
    `log`.

    The session ends with `stack`: as a failure if an error is raised, otherwise as a success.
    `first` is for other trackers.

    Raises:
        WakefulError: Weights & Biases cannot be reached.
    """
    try:
        session = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "wakeful"),
            name=config.name,
            # The same for the same run, so that `resume` finds its session.
            id=hashlib.sha256(f"{run.header.created} {config.name}".encode()).hexdigest()[:16],
            resume="allow",
            dir=str(run.path),
            config=config_to_table(config),
        )
    except wandb.Error as error:
        raise WakefulError(
            f"train.wandb: Weights & Biases cannot be reached ({error}); log in with wandb login, "
            "or set WANDB_MODE=offline"
        ) from None

    def finish_session(
        kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> None:
        session.finish(exit_code=0 if kind is None else 1)

    stack.push(finish_session)
    return session.log


_PACKAGES: Mapping[str, tuple[str, Callable[..., Callable[..., None]]]] = {
    "tensorboard": ("torch.utils.tensorboard", _log_to_tensorboard),
    "wandb": ("wandb", _log_to_wandb),
}
"""By the name of the package: its module, and the function that starts a session and returns the
function that logs to it."""


def _scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return a row's figures to draw, by names such as "validation/loss"."""
    return {
        f"{row['kind']}/{name}": value
        for name, value in row.items()
        if name not in _COUNTS and value is not None
    }
