"""Parts of a run, checked and made: text, model, optimizer, loss and precision."""

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
from wakeful.guard import lacks_memory
from wakeful.model.decoder import Decoder, admit
from wakeful.model.initialize import initialize
from wakeful.model.outside import check_outside
from wakeful.optim.build import check_step, configure_optimizer, optimizer_of
from wakeful.paged import load_weights
from wakeful.quantization import parse_scheme
from wakeful.runs.distributed import ALONE, World
from wakeful.runs.records import StepRow, ValidationRow, record
from wakeful.runs.run import Run
from wakeful.terminal.display import Display
from wakeful.training.events import Write, import_trackers
from wakeful.training.objective import make_loss
from wakeful.training.parallel import Parallel, check_shares, distribute


def admit_parts(config: Config) -> None:
    """Check every expression in a configuration, and import the users' modules that expressions
    such as "my_module:MyOptimizer" name.

    Only for a configuration that the user wrote: one read from a run may be another person's, and
    importing a module runs its code.
    """
    admit(config.model)
    check_outside(config.model)
    optimizer_of(config.optimizer.name, imports=True)
    _check_schemes(config, imports=True)


def _check_schemes(config: Config, *, imports: bool = False) -> None:
    """Raise `WakefulError` for a scheme of `train.quantize` that does not exist or needs
    calibration; with `imports`, users' modules that schemes name are imported.
    """
    for expression in config.train.quantize.schemes:
        if parse_scheme(expression, imports=imports).calibrated:
            raise WakefulError(
                f"train.quantize.schemes has {expression!r}: training calibrates nothing; "
                "use wakeful quantize on the finished run"
            )


def check_parts(config: Config, world: World = ALONE) -> None:
    """Check that the model, the optimizer and the measurements of a run can be made, and that its
    batch can be divided over the processes.

    The model is made on the meta device, where weights take no memory.

    Raises:
        WakefulError: one of these fails, or a tracker's package is not installed.
    """
    import_trackers(config)
    _check_schemes(config)
    check_shares(config, world)
    with _memory_errors(), torch.device("meta"):
        make_optimizer(config, Decoder(config.model))
    check_step(config.optimizer)


def check_run(config: Config, progress: Progress | None = None) -> tuple[Config, Data]:
    """Return (resolved configuration, data) of a run, checked as its start would check them.

    Only for a configuration that the user wrote: the user's modules that it names are imported.

    Raises:
        WakefulError: the run could not start.
    """
    admit_parts(config)  # imports these modules
    device = choose_device(config.train.device, field="train.device")
    check_parts(config)  # before the text is read, which may take long
    data = load_data(config.data, progress)
    data.check_config(config.data)
    config = resolve_config(config, data)
    check_parts(config)  # again, with the text's vocabulary
    data.batches(config)  # raises if the text is too short
    data.windows(config)
    if config.train.distill.teacher:  # reading it shows whether its tokens are the text's
        with torch.device("meta"):
            student = Decoder(config.model)
        end = data.train.end_of_text
        make_loss(config, student, device, end_of_text=end, tokenizer=data.tokenizer)
    return config, data


def resolve_config(config: Config, data: Data, model: ModelConfig | None = None) -> Config:
    """Return the configuration with every field resolved.

    The vocabulary's size becomes the data's, unless a larger one is configured. A warmup longer
    than the run is shortened to the run. If training starts from a model, `model` is its
    configuration, and replaces the configured one.

    Raises:
        WakefulError: the vocabulary that is configured, or that of `model`, lacks ids of the
            data's.
    """
    warmup = min(config.optimizer.warmup_steps, config.train.steps)
    config = dataclasses.replace(
        config,
        optimizer=dataclasses.replace(config.optimizer, warmup_steps=warmup),
    )
    if model is None:
        return dataclasses.replace(config, model=config.model.with_vocabulary(data.vocab_size))
    if data.vocab_size > model.vocab_size:
        raise WakefulError(
            f"the vocabularies differ: the text has ids up to {data.vocab_size - 1}, and the model "
            f"to start from has {model.vocab_size} tokens; tokenize the text as the model does"
        )
    return dataclasses.replace(config, model=model)


class Training:
    """State of a run in one process: data, model, optimizer, loss and records."""

    run: Run
    show: Display
    write: Write
    """Copies a row of metrics to the configured trackers."""
    stopped: list[int]
    """Signals received that end the run."""

    def __init__(
        self,
        config: Config,
        data: Data,
        device: torch.device,
        world: World = ALONE,
        *,
        initial: Decoder | None = None,
        teacher: Decoder | None = None,
    ) -> None:
        """Make data, model, optimizer and loss; the whole model lies on this process until
        `lay_out` distributes it.

        For `initial` see `make_decoder`, for `teacher` see `make_loss`.
        """
        self.config, self.data, self.device, self.world = config, data, device, world
        self.batches = data.batches(config, rank=world.rank, world_size=world.size)
        self.windows = data.windows(config)
        # Of several processes each gets only its share of the model onto its GPU.
        model_device = device if world.size == 1 else torch.device("cpu")
        self.decoder = make_decoder(config, model_device, initial)
        self.parallel = Parallel(self.decoder)
        self.optimizer = make_optimizer(config, self.decoder)
        self.loss = make_loss(
            config, self.decoder, device, world, end_of_text=data.train.end_of_text,
            tokenizer=data.tokenizer, teacher=teacher,
        )  # fmt: skip
        self.mixed = autocast(config.train, device)

    def lay_out(self) -> None:
        """Distribute the first process's model over all processes, which all must call it.

        Several processes get a new optimizer, for sharding replaces the parameters.
        """
        self.world.share_weights(self.decoder)
        self.parallel = distribute(self.config, self.decoder, self.device, self.world)
        if self.world.size > 1:
            self.optimizer = make_optimizer(self.config, self.decoder)

    @property
    def probe_context(self) -> contextlib.AbstractContextManager[object]:
        """Context of a forward pass in which probes measure activations.

        It has the precision of the weights. Sharded blocks have bfloat16 weights in mixed
        precision, and so need training's autocast.
        """
        return self.mixed if self.parallel.is_sharded else NO_AUTOCAST

    def accumulate_gradients(self, batch: torch.Tensor) -> torch.Tensor:
        """Add up the gradients of this process's part of a batch (B, L + 1), in micro-batches;
        return the loss, detached, the mean over all processes.
        """
        # Equal parts, so that the mean of their losses is that of the batch.
        parts = batch.to(self.device, non_blocking=True).split(
            self.config.train.micro_batch_size or len(batch)
        )
        losses: list[torch.Tensor] = []
        for number, part in enumerate(parts, 1):
            with self.parallel.accumulation_context(last=number == len(parts)):
                with self.mixed:
                    loss = self.parallel.call(self.loss, part[:, :-1], part[:, 1:]) / len(parts)
                loss.backward()
            losses.append(loss.detach())
        return self.world.sum(torch.stack(losses).sum()) / self.world.size

    def record(self, row: StepRow | ValidationRow) -> None:
        """Add a row to the run's metrics and to their copies."""
        self.write(record(self.run, row))


def make_decoder(config: Config, device: torch.device, initial: Decoder | None = None) -> Decoder:
    """Return the decoder to train, on the device: `initial` itself, which is trained in place, or
    one with random weights from `train.seed`.

    All of its weights are trainable. They are float64 if `train.dtype` is float64, else float32.
    """
    dtype = torch.float64 if config.train.dtype == "float64" else torch.float32
    with _memory_errors():
        if initial is None:
            decoder = initialize(Decoder(config.model), config.train.seed)
        else:
            load_weights(initial)  # some may still be in their files
            decoder = initial.requires_grad_(True)
        decoder.checkpoint_activations = config.train.checkpoint_activations
        return decoder.to(device=device, dtype=dtype)


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    """Raise `WakefulError` for errors that mean that the model is too large for memory."""
    try:
        yield
    # TypeError and OverflowError: torch's for a size that is too large for its integers.
    except (RuntimeError, MemoryError, TypeError, OverflowError) as error:
        if lacks_memory(error) or "overflow" in str(error).lower():
            raise WakefulError(
                "the model does not fit into memory: lower model.width, model.mlp_width, "
                "model.num_layers or the vocabulary"
            ) from error
        raise


def make_optimizer(config: Config, decoder: Decoder) -> torch.optim.Optimizer:
    """Return the optimizer over the decoder's parameters."""
    return configure_optimizer(config.optimizer, decoder.named_parameters(), seed=config.train.seed)


NO_AUTOCAST = contextlib.nullcontext()
"""Context of a pass in the weights' own precision."""


def autocast(train: TrainConfig, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context of the forward pass: mixed precision for bfloat16, else nothing."""
    if train.dtype != "bfloat16":
        return NO_AUTOCAST
    return torch.autocast(device.type, dtype=DTYPES["bfloat16"])
