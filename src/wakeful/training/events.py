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


def check_packages(config: Config) -> dict[str, Any]:
    """Return the modules of the trackers that `train` turns on, by name.

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
    """Yield a function that copies a row of metrics to the trackers of the configuration.

    `first` is the first step that this process logs. Rows that an interrupted run logged from there
    on are dropped by TensorBoard; Weights & Biases keeps those and drops the new ones.

    A resumed run continues the tracker's run. In Weights & Biases it has the run's name, in the
    project $WANDB_PROJECT or "wakeful" ($WANDB_MODE=offline keeps it in the run directory).
    """
    packages = check_packages(config) if enabled else {}
    with ExitStack() as stack:  # ends the trackers' sessions
        logs = [_PACKAGES[name][1](packages[name], config, run, first, stack) for name in packages]

        def write(row: Mapping[str, Any]) -> None:
            for log in logs:
                log(_scalars(row), step=row["step"])

        yield write


def _log_to_tensorboard(
    tensorboard: Any, config: Config, run: Run, first: int, stack: ExitStack
) -> Callable[..., None]:
    """Return a function that writes TensorBoard events into the run directory; events from step
    `first` on, of an interrupted run, are hidden.
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
    """Start a Weights & Biases session, or continue that of a resumed run, and return its `log`.

    `stack` ends it, as a failure where an error is raised.
    """
    try:
        session = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "wakeful"),
            name=config.name,
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

    def end(kind: type[BaseException] | None, _: object, __: TracebackType | None) -> None:
        session.finish(exit_code=0 if kind is None else 1)

    stack.push(end)
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
