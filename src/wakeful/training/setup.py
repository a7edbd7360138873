"""What a run is made of: its data, model, optimizer and arithmetic."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from wakeful.config.model import ModelConfig
from wakeful.config.schema import Config, DataConfig, TrainConfig
from wakeful.config.tables import from_table, to_table
from wakeful.data.mixture import MixedBatches, MixedData, MixedWindows
from wakeful.data.order import Batches, ValidationWindows
from wakeful.data.preparing import Progress, mixed, preparation, prepared
from wakeful.data.tasks.base import TaskData, task_of
from wakeful.data.tokenizer import Tokenizer
from wakeful.data.tokens import Data, PreparedData, TokenFile, is_prepared
from wakeful.device import DTYPES, choose_device
from wakeful.errors import WakefulError
from wakeful.loading.load import read_decoder
from wakeful.model.decoder import Decoder, admit
from wakeful.model.initialize import initialize
from wakeful.model.lora import adapt
from wakeful.model.outside import check_outside
from wakeful.optim.build import configured, optimizer_of
from wakeful.quant.schemes import parse_scheme
from wakeful.training.distillation import check_vocabulary
from wakeful.training.events import check_installed
from wakeful.training.objective import check_distill, check_same_tokens, open_store
from wakeful.training.parallel import check_shares
from wakeful.training.rehearsal import rehearse
from wakeful.world import ALONE, World

_TOO_LARGE = ("allocate memory", "Overflow when unpacking", "invalid size", "overflow")
"""What torch says, in errors of no special type, of a tensor larger than memory or than numbers."""


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
    check_installed(config)
    _check_schemes(config)
    check_distill(config)
    check_shares(config, world)
    if config.train.lora.rank and world.size > 1:
        raise WakefulError(
            f"train.lora.rank = {config.train.lora.rank} is for one process, and here are "
            f"{world.size}: leave it out, or train without torchrun"
        )
    with _memory_errors(), torch.device("meta"):
        make_optimizer(config, adapted(config, Decoder(config.model)))
    rehearse(config.optimizer)


def check_run(config: Config, progress: Progress | None = None) -> tuple[Config, Data]:
    """Raise what a run would raise before its first step; return it resolved, and its data."""
    admit_parts(config)
    device = choose_device(config.train.device, field="train.device")
    check_parts(config)
    data = load_data(config.data, progress, imports=True)
    check_prepared(config.data, data)
    config = resolved(config, data)
    check_parts(config)
    make_batches(config, data, ALONE)
    make_windows(config, data)
    if config.train.distill.teacher:
        teacher = read_decoder(config.train.distill.teacher, dtype=torch.float32, device=device)
        check_vocabulary(config.model.vocab_size, teacher.decoder().config.vocab_size)
        check_same_tokens(data.tokenizer, teacher)
        if config.train.distill.top_k:
            open_store(config, teacher.decoder(), data.train.end_of_text)
    return config, data


def make_batches(config: Config, data: Data, world: World) -> Batches:
    """Return this process's training batches."""
    options: dict[str, Any] = {
        "length": config.train.length,
        "batch_size": config.train.batch_size,
        "seed": config.train.seed,
        "rank": world.rank,
        "world_size": world.size,
        "bos": bos_of(config, data),
        "fixed": config.data.fixed_windows,
        "first": config.data.first_batch,
    }
    most = config.data.max_tokens
    if most:
        tokens = data.train
        if not isinstance(tokens, TokenFile):
            raise WakefulError(
                f"data.max_tokens = {most} is for one text: {config.data.source!r} has no first "
                "tokens; leave it out"
            )
        if most < config.train.length + 1:
            raise WakefulError(
                f"data.max_tokens = {most} is less than one sequence needs: train.length + 1 = "
                f"{config.train.length + 1}"
            )
        return Batches(tokens.beginning(most), **options)
    if isinstance(data, MixedData):
        return MixedBatches(data.train, **options)
    return Batches(data.train, **options)


def make_windows(config: Config, data: Data) -> ValidationWindows:
    """Return the validation set as the run evaluates it."""
    options: dict[str, Any] = {
        "length": config.train.length,
        "batch_size": config.train.eval_batch_size,
        "bos": bos_of(config, data),
    }
    if isinstance(data, MixedData):
        return MixedWindows(data.validation, **options)
    return ValidationWindows(data.validation, **options)


def bos_of(config: Config, data: Data) -> int | None:
    """Return the token that every window begins with, and None where it is the text's own."""
    begins = config.data.bos or isinstance(data, TaskData)
    return data.tokenizer.begin if begins else None


def load_data(
    config: DataConfig, progress: Progress | None = None, *, imports: bool = False
) -> Data:
    """Return the tokens that a configuration names, preparing and caching them if need be.

    `imports` lets a task's module be imported: only for a source that the user wrote.
    """
    task = task_of(config.source, imports=imports)
    if task is not None:
        return TaskData(task)
    mixture = mixed(config, config.source, progress)
    if mixture is not None:
        return mixture
    if is_prepared(Path(config.source)):
        return PreparedData.open(config.source)
    return prepared(
        config.source,
        progress=progress,
        **preparation(config),
    )


def check_prepared(config: DataConfig, data: Data) -> None:
    """Raise `WakefulError` where a field asks prepared data for what it was not prepared with.

    A field that is left at its default asks for nothing. Neither do fields whose default is a size
    or a share: nobody can say who has set them. Of a mixture, `max_bytes` and `keep_overlap` are
    for the parts that are not prepared yet.
    """
    if isinstance(data, TaskData):
        for name in ("validation_source", "max_bytes", "max_tokens", "keep_overlap", "tokenizer"):
            if getattr(config, name):
                raise WakefulError(
                    f"data.{name} = {getattr(config, name)!r} does nothing: data.source = "
                    f"{config.source!r} is a task, which has its own; leave it out"
                )
        return
    if isinstance(data, MixedData):
        if not all(is_prepared(Path(domain.source)) for domain in data.domains):
            plain = DataConfig()
            config = dataclasses.replace(
                config, max_bytes=plain.max_bytes, keep_overlap=plain.keep_overlap
            )
        for domain, part in zip(data.domains, data.parts, strict=True):
            check_prepared(dataclasses.replace(config, source=domain.source), part)
        return
    if not is_prepared(Path(config.source)):
        return
    there = _as_prepared(config, data)
    for name in ("validation_source", "max_bytes", "keep_overlap"):
        asked, found = getattr(config, name), getattr(there, name)
        if asked and asked != found:
            raise WakefulError(
                f"data.{name} = {asked!r} does nothing: data.source = {config.source!r} is "
                f"prepared, with {name} = {found!r}; leave it out, or prepare the text again"
            )
    if config.tokenizer:
        ours, theirs = Tokenizer.load(config.tokenizer).fingerprint, data.tokenizer.fingerprint
        if ours != theirs:
            raise WakefulError(
                f"data.tokenizer = {config.tokenizer!r} does nothing: data.source = "
                f"{config.source!r} is prepared with another; leave it out, or prepare the text "
                "again"
            )


def _as_prepared(config: DataConfig, data: Data) -> DataConfig:
    """Return the fields that decided how data was prepared as they were then."""
    settings, sources = data.info.get("settings"), data.info.get("validation_source")
    if not isinstance(settings, dict):  # prepared before it was written down
        return config
    then = {
        "validation_source": sources[0] if isinstance(sources, list) and len(sources) == 1 else "",
        "validation_fraction": settings.get("validation_fraction") or config.validation_fraction,
        "keep_overlap": settings.get("keep_overlap") or False,
        "vocab_size": settings.get("vocab_size") or data.vocab_size,
        "text_field": settings.get("text_field") or config.text_field,
        "max_bytes": settings.get("max_bytes") or 0,
    }
    return from_table(DataConfig, to_table(config) | then)


def resolved(config: Config, data: Data, given: ModelConfig | None = None) -> Config:
    """Return the configuration as it is carried out.

    The vocabulary's size is the data's unless a larger one is asked for, and so are the fields that
    prepared data was made with; a warmup ends with the run at the latest. With a `given` model its
    own vocabulary stays, which the data's ids must be within.
    """
    warmup = min(config.optimizer.warmup_steps, config.train.steps)
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, warmup_steps=warmup)
    )
    if is_prepared(Path(config.data.source)):
        config = dataclasses.replace(config, data=_as_prepared(config.data, data))
    if given is None:
        return dataclasses.replace(config, model=config.model.of_tokens(data.vocab_size))
    if data.vocab_size > given.vocab_size:
        raise WakefulError(
            f"the vocabularies differ: the text has ids up to {data.vocab_size - 1}, and the model "
            f"to start from has {given.vocab_size} tokens; tokenize the text as the model does"
        )
    return dataclasses.replace(config, model=given)


def make_decoder(config: Config, device: torch.device, given: Decoder | None = None) -> Decoder:
    """Return the decoder on its device: the `given` one, to be trained, or a fresh one."""
    dtype = torch.float64 if config.train.dtype == "float64" else torch.float32
    with _memory_errors():
        if given is None:
            decoder = initialize(Decoder(config.model), config.train.seed)
        else:
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
    return configured(config.optimizer, decoder.named_parameters(), seed=config.train.seed)


AS_IT_IS = contextlib.nullcontext()
"""The context of a pass in the weights' own precision."""


def autocast(train: TrainConfig, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context of the forward pass: mixed precision for bfloat16, else nothing."""
    if train.dtype != "bfloat16":
        return AS_IT_IS
    return torch.autocast(device.type, dtype=DTYPES["bfloat16"])
