"""The training loop."""

import contextlib
import dataclasses
import math
import shlex
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from wakeful.config.schema import Config, config_to_toml
from wakeful.config.tables import to_table
from wakeful.data.base import Data
from wakeful.data.preparing import load_data
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import Diverged, Interrupted, WakefulError
from wakeful.model.decoder import Decoder
from wakeful.optim.build import set_rate, warmup_cosine
from wakeful.optim.sharding import full_tensor, own_part
from wakeful.probes.watch import check_one_matrix
from wakeful.runs import checkpoint
from wakeful.runs.distributed import (
    World,
    is_lost,
    join_processes,
    lost_message,
    set_signal_handler,
    started_as,
)
from wakeful.runs.records import check_same_data, check_step_rows, data_facts
from wakeful.runs.run import Run, SharedRun, environment
from wakeful.terminal.display import Display
from wakeful.training.deferred import Fault, PendingSteps, prefetch
from wakeful.training.events import event_writer
from wakeful.training.finishing import finish_run, forget_peak
from wakeful.training.parallel import choose_own_device
from wakeful.training.setup import Training, admit_parts, check_parts, resolve_config
from wakeful.training.validation import optimal_loss, validate
from wakeful.training.watching import record_diagnosis

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_LOG_EVERY = 10
"""Steps between readings of the loss on a GPU, which waits for each."""


@dataclass(frozen=True)
class Initial:
    """Weights to start from instead of random ones."""

    decoder: Decoder
    """The model itself, in the precision to train in; it is trained in place."""
    origin: Mapping[str, Any]
    """Source of the weights, as run.json records it under "initial"."""


def train_run(
    config: Config,
    path: str | Path,
    *,
    resume: bool = False,
    steps: int = 0,
    initial: Initial | None = None,
    show: Display | None = None,
) -> Run:
    """Train one model into the run directory `path` and return that run.

    With `resume`, an existing run continues from its newest checkpoint, with its own configuration;
    `config` and `initial` are not used. On one machine's CPU the losses and the final weights are
    those of a run that was never interrupted, to the bit. `steps` lengthens a resumed run to so
    many steps, 0 does not: from its newest checkpoint on, the learning rate is that of a run
    planned this long, so it rises again from the end of the old schedule.

    `initial` weights are evaluated before the first step and become the checkpoint of step 0, so
    that resuming does not need them. The model's configuration is then theirs, and its vocabulary
    may be larger than the data's.

    Users' modules that the configuration names are imported only for a new run with random weights:
    other configurations were read from a folder, or from a recipe in one.

    Raises:
        WakefulError: the configuration or the text cannot be trained on, `path` exists (or, with
            `resume`, holds no such run), the disk is full, or a loss is not finite. Files that
            existed before are kept.
    """
    with join_processes() as world:
        show = show if show and world.first else Display()
        return _train_in_world(config, path, resume, steps, initial, show, world)


def _train_in_world(
    config: Config,
    path: str | Path,
    resume: bool,
    steps: int,
    initial: Initial | None,
    show: Display,
    world: World,
) -> Run:
    """Create or resume a run, train it, finish it and return it, as `train_run` says.

    Every process calls it; the first one writes the run directory, and `show` is its display.
    """
    if resume:
        config = _resumed_config(Run.open(path), steps)
    else:
        if world.first:
            Run(path).refuse_existing("train")
        if initial is None:
            admit_parts(config)
    device = choose_own_device(config.train.device, world)
    check_parts(config, world)
    # One process of each machine prepares the text, and the others find it on disk.
    data = world.leader_first(lambda: load_data(config.data, show.stage))
    world.check_same(
        to_table(data_facts(data).without_source),
        "the processes read different data: give each machine the same files",
    )
    config = config if resume else _new_config(config, data, initial, show)
    initial_decoder = None if resume or initial is None else initial.decoder
    training = Training(config, data, device, world, initial=initial_decoder)
    training.show = show
    if config.train.diagnose.every:  # fails now, not at the first diagnosis
        check_one_matrix(training.decoder, config.train.length)
    if resume:
        check_same_data(Run.open(path), data)
    elif world.first:
        _create_run(training, path, initial)
    world.gather("the run is there")  # all wait until the first process has created it
    training.lay_out()

    run = training.run = Run.open(path) if world.first else SharedRun.open(path)
    with run.lock(), _explain_lost_process(training), _stop_signals(world) as training.stopped:
        world.gather("locked")  # all wait until the first process holds the run
        with run.under_way():
            forget_peak(device)
            if steps and run.config != config:  # it is lengthened
                run.write_text("config.toml", config_to_toml(config))
                for name in ("summary.json", "validation.parquet", "metrics.parquet"):
                    run.remove(name)  # they describe its old end
            progress = checkpoint.RunProgress()
            if resume and checkpoint.steps(run.checkpoints):
                progress = _resume_checkpoint(training)
            steps_done, diagnose = progress.step, config.train.diagnose
            # Rows after these steps are logged again; without any step, those of step 0 too.
            run.drop_metrics_after(steps_done or -1, end=config.train.steps)
            check_step_rows(run, done=steps_done == config.train.steps)
            with event_writer(
                config, run, enabled=world.first, first=steps_done + 1
            ) as training.write:
                if steps_done == 0 and run.header.initial is not None:  # weights are given
                    validate(training, 0)
                if steps_done == 0 and diagnose.every and diagnose.heads:
                    record_diagnosis(training, 0)
                _run_steps(training, progress)
                finish_run(training)
        _check_stopped(training)
    return run


def _new_config(config: Config, data: Data, initial: Initial | None, show: Display) -> Config:
    """Return a new run's configuration with every field resolved; `initial` are weights to start
    from, or None.

    If embedding rows stay unused or the warmup is shortened, `show` prints a note.
    """
    data.check_config(config.data)
    warmup = config.optimizer.warmup_steps
    initial_model = None if initial is None else initial.decoder.config
    config = resolve_config(config, data, initial_model)
    num_unused = config.model.vocab_size - data.vocab_size
    if num_unused and initial is None:
        show.note(
            f"model.vocab_size = {config.model.vocab_size:,} is {num_unused:,} more than the "
            "tokenizer has: their rows are never read"
        )
    if config.optimizer.warmup_steps < warmup:
        show.note(
            f"optimizer.warmup_steps = {warmup} is longer than the run: the learning rate rises "
            f"over all of its {config.train.steps} steps"
        )
    return config


def _resumed_config(run: Run, steps: int) -> Config:
    """Return the configuration of a run to resume, with `train.steps` raised to `steps` unless that
    is 0.

    Raises:
        WakefulError: the run's newest checkpoint is of another model than the configuration's, or
            `steps` would shorten the run.
    """
    config = run.config
    if checkpoint.steps(run.checkpoints):
        checkpoint.check_description(checkpoint.newest_checkpoint(run.checkpoints), config.model)
    if not steps:
        return config
    if steps < config.train.steps:
        raise WakefulError(
            f"train.steps = {steps} is less than the {config.train.steps} of {run.path}: a run can "
            "only be lengthened"
        )
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=steps))


def _create_run(training: Training, path: str | Path, initial: Initial | None) -> None:
    """Write a new run directory at `path`: the configuration, the environment, facts about the data
    and the tokenizer. With `initial` weights, write a checkpoint of step 0 too.
    """
    config, data = training.config, training.data
    origin: dict[str, Any] = {} if initial is None else {"initial": dict(initial.origin)}
    with Run.create(path, "train", {"name": config.name, **origin}) as new:
        new.write_text("config.toml", config_to_toml(config))
        new.write_json("environment.json", environment(training.device, training.world.size))
        new.write_json("data.json", data_facts(data))
        _tokenizer_as_trained(config, data).save(new.path)
        if initial is not None:
            checkpoint.save_checkpoint(
                new.checkpoints, training.decoder, training.optimizer, checkpoint.RunProgress(),
                keep=1,
            )  # fmt: skip


def _tokenizer_as_trained(config: Config, data: Data) -> Tokenizer:
    """Return the data's tokenizer, set to add BOS before a text if every window in training begins
    with one, and otherwise set to add none.
    """
    tokenizer = data.tokenizer
    if data.window_bos(config.data) is not None:
        return tokenizer.with_bos()
    return tokenizer.without_bos() if tokenizer.adds_bos else tokenizer


def _resume_checkpoint(training: Training) -> checkpoint.RunProgress:
    """Load weights and optimizer from the run's newest checkpoint and return its progress.

    Every process calls it. Then the first one deletes checkpoints beyond the number to keep.
    """
    world, folder = training.world, training.run.checkpoints
    newest = checkpoint.newest_checkpoint(folder)
    checkpoint.load_model(newest, training.decoder, world)
    progress = checkpoint.load_optimizer(newest, training.optimizer)
    world.gather("loaded")  # all processes have read it
    if world.first:
        checkpoint.prune_checkpoints(folder, keep=training.config.train.keep_checkpoints)
    return progress


def _run_steps(training: Training, progress: checkpoint.RunProgress) -> None:
    """Train from the step in `progress` to the last, with evaluations and checkpoints."""
    config, run, world, device = training.config, training.run, training.world, training.device
    settings, optim = config.train, config.optimizer
    decoder, optimizer, first = training.decoder, training.optimizer, progress.step
    parameters = [p for p in decoder.parameters() if p.requires_grad]
    log_every = settings.log_every or (1 if device.type == "cpu" else _LOG_EVERY)
    pending = PendingSteps(progress.tokens, progress.seconds)
    batches = prefetch(training.batches, range(first, settings.steps), device)
    decoder.train()
    _announce_run(training, first)

    for step in range(first, settings.steps):
        pending.begin()
        lr = warmup_cosine(
            step,
            steps=settings.steps,
            warmup_steps=optim.warmup_steps,
            initial=optim.initial_lr,
            peak=optim.lr,
            final=optim.final_lr,
        )
        set_rate(optimizer, lr)
        batch = next(batches)
        loss = training.accumulate_gradients(batch)
        norm = full_tensor(torch.nn.utils.clip_grad_norm_(parameters, optim.clip or math.inf))
        step_count = step + 1
        tokens = world.size * batch.shape[0] * (batch.shape[1] - 1)
        pending.add(step_count, lr, tokens, loss, norm, optimal_loss(training, batch))

        last = step_count == settings.steps
        evaluates = _is_due(step_count, settings.eval_every) and not last
        diagnoses = _is_due(step_count, settings.diagnose.every) or (
            last and settings.diagnose.every > 0
        )
        saves = _is_due(step_count, settings.checkpoint_every) or last
        # A single process sees its own signal; several have to ask each other.
        checks_signals = (
            bool(training.stopped) if world.size == 1 else _is_due(step_count, _LOG_EVERY)
        )
        reads = _is_due(step_count, log_every) or evaluates or diagnoses or saves or checks_signals
        fault = pending.read() if reads else None
        if fault is None:
            fault = _optimizer_step(optimizer, pending)
        if reads or fault is not None:
            for row in pending.rows():
                training.record(row)
                training.show.step(row.step, settings.steps, row.loss, row.tokens_per_second)
        if fault is not None:
            raise _divergence_error(training, fault)

        if evaluates:
            validate(training, step_count)
        if diagnoses:
            record_diagnosis(training, step_count)
        stop = _received_signal(training) if reads else ""
        if saves or stop:
            bad = not all(own_part(parameter).isfinite().all() for parameter in parameters)
            if world.sum(torch.tensor(int(bad))):
                raise _divergence_error(training, Fault(step_count, "a weight is not finite"))
            saved_progress = checkpoint.RunProgress(step_count, pending.tokens, pending.seconds)
            checkpoint.save_checkpoint(
                run.checkpoints, decoder, optimizer, saved_progress, keep=settings.keep_checkpoints,
                world=world,
            )  # fmt: skip
        if stop and not last:
            raise Interrupted(
                f"stopped by {stop} after step {step_count}, which is saved",
                f"continue with: {resume_command('train', training.run.path)}",
            )


def _check_stopped(training: Training) -> None:
    """Raise `Interrupted` if a stop signal came after the last step. Every process calls it.

    This run is done then, but the tool that started it may have more to do, and must stop.
    """
    training.world.meet()  # wait: the first process finishes the run alone, which may take long
    if stop := _received_signal(training):
        raise Interrupted(
            f"stopped by {stop} after the last step, and the run is done",
            f"read it with: wakeful report {shlex.quote(str(training.run.path))}",
        )


def _optimizer_step(optimizer: torch.optim.Optimizer, pending: PendingSteps) -> Fault | None:
    """Take the optimizer's step, drop the gradients and return None.

    If the step fails because a pending loss or gradient norm is not finite, return that fault; any
    other error is raised.
    """
    try:
        optimizer.step()
    except RuntimeError:  # e.g. a decomposition of a matrix that is not finite
        fault = pending.read()
        if fault is None:
            raise
        return fault
    optimizer.zero_grad(set_to_none=True)
    return None


def _is_due(step: int, every: int) -> bool:
    """Return whether work that is done every `every` steps (0: never) is due after this step."""
    return every > 0 and step % every == 0


def _announce_run(training: Training, first: int) -> None:
    """Show the number of steps that remain after `first`, tokens per step and the model's size."""
    config = training.config
    remaining = config.train.steps - first
    tokens_per_step = config.train.batch_size * config.train.length
    size = training.decoder.num_parameters()["total"]
    training.show.begin(
        first,
        config.train.steps,
        f"{remaining} steps of {tokens_per_step:,} tokens, {size / 1e6:,.2f}M parameters",
    )


def _divergence_error(training: Training, fault: Fault) -> Diverged:
    """Return the error for a step with a loss, norm or weight that is not finite.

    Its message says where the first four sequences of the step's batch begin in the training text.
    Every process calls it, for each has a part of the batch.
    """
    index = fault.step - 1  # batches are counted from 0
    own_starts = [int(start) for start in training.batches.starts(index)[:4]]
    starts = [start for part in training.world.gather(own_starts) for start in part][:4]
    return Diverged(
        f"{fault.message} at step {fault.step}, on the batch whose sequences begin at training "
        f"tokens {', '.join(map(str, starts))}...; {_checkpoint_text(training.run)}. Lower "
        "optimizer.lr or optimizer.clip, or look at that text"
    )


def _checkpoint_text(run: Run) -> str:
    saved = checkpoint.steps(run.checkpoints)
    return f"the checkpoint of step {saved[-1]} is kept" if saved else "there is no checkpoint yet"


def resume_command(verb: str, folder: Path) -> str:
    """Return the command that continues the run in `folder`, of the tool `verb` ("train").

    It uses torchrun if this process is one of several.
    """
    _, num_processes = started_as()
    starter = "wakeful" if num_processes == 1 else "torchrun [as before] -m wakeful"
    return f"{starter} {verb} --resume {shlex.quote(str(folder))}"


@contextlib.contextmanager
def _explain_lost_process(training: Training) -> Iterator[None]:
    """Context in which an error that means that another process is gone becomes a `WakefulError`.

    Its message says which checkpoint is left and how to continue. Other errors stay as they are.
    """
    try:
        yield
    except Exception as error:
        if not is_lost(error):
            raise
        command = resume_command("train", training.run.path)
        remedy = f"{_checkpoint_text(training.run)}; continue with: {command}"
        raise WakefulError(lost_message(remedy)) from error


def _received_signal(training: Training) -> str:
    """Return the name of a stop signal that any process has received, or "" if none has.

    Every process calls it.
    """
    own_counts = torch.tensor([training.stopped.count(number) for number in _SIGNALS])
    counts = training.world.sum(own_counts).tolist()
    for number, count in zip(_SIGNALS, counts, strict=True):
        if count:
            return number.name
    return ""


@contextlib.contextmanager
def _stop_signals(world: World) -> Iterator[list[int]]:
    """Collect SIGTERM and SIGINT in the list that is yielded, so that the training loop can end its
    step and save it.

    In a single process, a second signal raises KeyboardInterrupt at once. In one of several it does
    not: the terminal sends them a Ctrl-C, and torchrun sends it again.
    """
    received: list[int] = []

    def receive(number: int, frame: Any) -> None:
        if received and world.size == 1:
            raise KeyboardInterrupt
        received.append(number)

    final_handlers = {number: set_signal_handler(number, receive) for number in _SIGNALS}
    try:
        yield received
    except BaseException:
        if world.size > 1:
            # When one process ends, torchrun sends the others SIGTERM: it must not cut off their
            # messages.
            final_handlers = dict.fromkeys(_SIGNALS, signal.SIG_IGN)
        raise
    finally:
        for number, handler in final_handlers.items():
            set_signal_handler(number, handler)
