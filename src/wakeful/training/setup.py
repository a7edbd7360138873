"""What a run is made of: its data, model, optimizer and arithmetic."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from wakeful.config.model import ModelConfig
from wakeful.config.schema import Config, DataConfig
from wakeful.data.cache import prepared
from wakeful.data.progress import Progress
from wakeful.data.tokens import PreparedData, is_prepared
from wakeful.device import DTYPES
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.model.initialise import initialise
from wakeful.optim import build_optimizer

_TOO_LARGE = ("allocate memory", "Overflow when unpacking", "invalid size", "overflow")
"""What torch says, in errors of no special type, of a tensor larger than memory or than numbers."""


def load_data(config: DataConfig, progress: Progress | None = None) -> PreparedData:
    """Return the tokens that a configuration names, preparing and caching them if need be."""
    if is_prepared(Path(config.source)):
        return PreparedData.open(config.source)
    return prepared(
        config.source,
        tokenizer=config.tokenizer or None,
        vocab_size=None if config.tokenizer else config.vocab_size,
        validation_source=config.validation_source or None,
        validation_fraction=config.validation_fraction,
        max_bytes=config.max_bytes or None,
        text_field=config.text_field,
        keep_overlap=config.keep_overlap,
        progress=progress,
    )


def resolved(config: Config, data: PreparedData, given: ModelConfig | None = None) -> Config:
    """Return the configuration with what only the data knows: the vocabulary's size.

    With a `given` model its own vocabulary stays, which the data's ids must be within.
    """
    if given is None:
        model = dataclasses.replace(config.model, vocab_size=data.vocab_size)
        return dataclasses.replace(config, model=model)
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
            decoder = initialise(Decoder(config.model), config.train.seed)
        else:
            decoder = given.requires_grad_(True)
        decoder.checkpoint_activations = config.train.checkpoint_activations
        return decoder.to(device=device, dtype=dtype)


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
    optimizer = config.optimizer
    betas = (optimizer.beta1, optimizer.beta2)
    options: dict[str, dict[str, Any]] = {
        "adamw": {"betas": betas, "eps": optimizer.eps},
        "orthoadam": {
            "betas": betas,
            "eps": optimizer.eps,
            "rotation": optimizer.rotation,
            "seed": config.train.seed,
        },
        "muon": {"betas": betas, "eps": optimizer.eps},
        "rmsprop": {"alpha": optimizer.beta2, "eps": optimizer.eps},
        "sgd_momentum": {"momentum": optimizer.beta1},
    }
    return build_optimizer(
        optimizer.name,
        decoder.named_parameters(),
        lr=optimizer.lr,
        weight_decay=optimizer.weight_decay,
        **options.get(optimizer.name, {}),
    )


def autocast(config: Config, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context of the forward pass: mixed precision for bfloat16, else nothing."""
    if config.train.dtype != "bfloat16":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=DTYPES["bfloat16"])
