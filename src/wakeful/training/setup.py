"""A run's parts, checked and made: its text, model, optimizer, loss and arithmetic."""

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from wakeful.config.model import ModelConfig
from wakeful.config.schema import Config, TrainConfig
from wakeful.data.base import Data
from wakeful.data.preparing import Progress, load_data
from wakeful.device import DTYPES, choose_device
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder, admit
from wakeful.model.initialize import initialize
from wakeful.model.lora import adapt
from wakeful.model.outside import check_outside
from wakeful.optim.build import check_step, configure_optimizer, optimizer_of
from wakeful.paged import load_weights
from wakeful.quantization import parse_scheme
from wakeful.runs.distributed import ALONE, World
from wakeful.runs.records import Evaluation, Step, record
from wakeful.runs.run import Run
from wakeful.terminal.display import Display
from wakeful.training.events import Write, wanted_packages
from wakeful.training.objective import make_loss
from wakeful.training.parallel import Parallel, check_shares, distribute

_TOO_LARGE = ("allocate memory", "Overflow when unpacking", "invalid size", "overflow")
"""Torch's messages, in errors of no special type, about a tensor larger than memory or numbers."""


def admit_parts(config: Config) -> None:
    """Check every expression, and import the users' modules that they name.

    For a configuration that the user wrote, never for one read from a run.
    """
    admit(config.model)
    check_outside(config.model)
    optimizer_of(config.optimizer.name, imports=True)
    _check_schemes(config, imports=True)


def _check_schemes(config: Config, *, imports: bool = False) -> None:
    for expression in config.train.quantize.schemes:
        if parse_scheme(expression, imports=imports).calibrated:
            raise WakefulError(
                f"train.quantize.schemes has {expression!r}: training calibrates nothing; "
                "use wakeful quantize on the finished run"
            )


def check_parts(config: Config, world: World = ALONE) -> None:
    """Raise what making the model, the optimizer or the measurements of a run would raise.

    The model is made on the meta device, where weights take no memory.
    """
    wanted_packages(config)
    _check_schemes(config)
    check_shares(config, world)
    if config.train.lora.rank and world.size > 1:
        raise WakefulError(
            f"adapters (lora.rank = {config.train.lora.rank}) are for one process, and here are "
            f"{world.size}: leave them out, or train without torchrun"
        )
    with _memory_errors(), torch.device("meta"):
        make_optimizer(config, adapted(config, Decoder(config.model)))
    check_step(config.optimizer)


def check_run(config: Config, progress: Progress | None = None) -> tuple[Config, Data]:
    """Raise what a run would raise before its first step; return it resolved, and its data."""
    admit_parts(config)
    device = choose_device(config.train.device, field="train.device")
    check_parts(config)
    data = load_data(config.data, progress, imports=True)
    data.check(config.data)
    config = resolved(config, data)
    check_parts(config)
    data.batches(config)
    data.windows(config)
    if config.train.distill.teacher:
        with torch.device("meta"):
            blank = Decoder(config.model)
        end = data.train.end_of_text
        make_loss(config, blank, device, end_of_text=end, tokenizer=data.tokenizer)
    return config, data


def resolved(config: Config, data: Data, given: ModelConfig | None = None) -> Config:
    """Return the configuration as it is carried out.

    The vocabulary's size is the data's unless a larger one is asked for, and so are the fields that
    prepared data was made with; a warmup ends with the run at the latest. With a `given` model its
    own vocabulary stays, which the data's ids must be within.
    """
    warmup = min(config.optimizer.warmup_steps, config.train.steps)
    config = dataclasses.replace(
        config,
        data=data.settled(config.data),
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=warmup),
    )
    if given is None:
        return dataclasses.replace(config, model=config.model.of_tokens(data.vocab_size))
    if data.vocab_size > given.vocab_size:
        raise WakefulError(
            f"the vocabularies differ: the text has ids up to {data.vocab_size - 1}, and the model "
            f"to start from has {given.vocab_size} tokens; tokenize the text as the model does"
        )
    return dataclasses.replace(config, model=given)


class Training:
    """A run as one of its processes sees it: what learns, from what, and where that is recorded."""

    run: Run
    show: Display
    write: Write
    """Copies a row of metrics to wherever the configuration says."""
    stopped: list[int]
    """The signals that asked for an end."""

    def __init__(
        self,
        config: Config,
        data: Data,
        device: torch.device,
        world: World = ALONE,
        *,
        given: Decoder | None = None,
        teacher: Decoder | None = None,
    ) -> None:
        """Make the parts, the model whole; `given` is as for `make_decoder`, `teacher` as for
        `make_loss`.
        """
        self.config, self.data, self.device, self.world = config, data, device, world
        self.batches = data.batches(config, rank=world.rank, world_size=world.size)
        self.windows = data.windows(config)
        here = device if world.size == 1 else torch.device("cpu")
        self.decoder = make_decoder(config, here, given)
        self.parallel = Parallel(self.decoder)
        self.optimizer = make_optimizer(config, self.decoder)
        self.loss = make_loss(
            config, self.decoder, device, world, end_of_text=data.train.end_of_text,
            tokenizer=data.tokenizer, teacher=teacher,
        )  # fmt: skip
        self.mixed = autocast(config.train, device)

    def lay_out(self) -> None:
        """Lay the first process's model over all of them, which all call it, and make the optimizer
        of that.
        """
        self.world.share_weights(self.decoder)
        self.parallel = distribute(self.config, self.decoder, self.device, self.world)
        if self.world.size > 1:
            self.optimizer = make_optimizer(self.config, self.decoder)

    @property
    def as_watched(self) -> contextlib.AbstractContextManager[object]:
        """The context of a pass that probes watch: the weights' own precision.

        Blocks in shares get theirs in that of training, which asks for its context.
        """
        return self.mixed if self.parallel.in_shares else AS_IT_IS

    def gradients(self, batch: torch.Tensor) -> torch.Tensor:
        """Add up the gradients of this process's part of a batch, as many sequences at a time as
        fit; return the loss, the mean over all processes.
        """
        parts = batch.to(self.device, non_blocking=True).split(
            self.config.train.micro_batch_size or len(batch)
        )
        losses: list[torch.Tensor] = []
        for number, part in enumerate(parts, 1):
            with self.parallel.adding(last=number == len(parts)):
                with self.mixed:
                    loss = self.parallel.call(self.loss, part[:, :-1], part[:, 1:]) / len(parts)
                loss.backward()
            losses.append(loss.detach())
        return self.world.sum(torch.stack(losses).sum()) / self.world.size

    def record(self, row: Step | Evaluation) -> None:
        """Add a row to the run's metrics and to their copies."""
        self.write(record(self.run, row))


def make_decoder(config: Config, device: torch.device, given: Decoder | None = None) -> Decoder:
    """Return the decoder on its device: the `given` one, to be trained, or a fresh one."""
    dtype = torch.float64 if config.train.dtype == "float64" else torch.float32
    with _memory_errors():
        if given is None:
            decoder = initialize(Decoder(config.model), config.train.seed)
        else:
            load_weights(given)
            decoder = given.requires_grad_(True)
        decoder.checkpoint_activations = config.train.checkpoint_activations
        return adapted(config, decoder.to(device=device, dtype=dtype))


def adapted(config: Config, decoder: Decoder) -> Decoder:
    """Return the decoder with the adapters that a configuration asks for, in place."""
    lora = config.train.lora
    if not lora.rank:
        return decoder
    return adapt(decoder, lora.rank, alpha=lora.alpha, modules=lora.modules, seed=config.train.seed)


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError, TypeError, OverflowError) as error:
        if isinstance(error, MemoryError | torch.OutOfMemoryError) or any(
            sign in str(error) for sign in _TOO_LARGE
        ):
            raise WakefulError(
                "the model does not fit into memory: lower model.width, model.mlp_width, "
                "model.num_layers or the vocabulary"
            ) from error
        raise


def make_optimizer(config: Config, decoder: Decoder) -> torch.optim.Optimizer:
    """Return the optimizer over the decoder's parameters."""
    return configure_optimizer(config.optimizer, decoder.named_parameters(), seed=config.train.seed)


AS_IT_IS = contextlib.nullcontext()
"""The context of a pass in the weights' own precision."""


def autocast(train: TrainConfig, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context of the forward pass: mixed precision for bfloat16, else nothing."""
    if train.dtype != "bfloat16":
        return AS_IT_IS
    return torch.autocast(device.type, dtype=DTYPES["bfloat16"])
