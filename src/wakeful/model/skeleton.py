"""A decoder without its weights, made of a description that somebody else wrote.

What is built from a description takes time and memory by the numbers in it. Here they are held to
what the weights' own files can be before anything is built.
"""

from collections.abc import Mapping
from pathlib import Path

import torch

from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder


def skeleton(config: ModelConfig, num_tensors: int, place: Path) -> Decoder:
    """Return the decoder on the meta device, where weights take no memory.

    Raises:
        WakefulError: `place`, with so many tensors, cannot hold a model of so many layers, or no
            tensor can have the sizes described.
    """
    if config.num_layers > num_tensors:
        raise WakefulError(
            f"{place} is of another model: it has {num_tensors} tensors, and the configuration "
            f"{config.num_layers} layers"
        )
    try:
        with torch.device("meta"):
            return Decoder(config)
    except (RuntimeError, TypeError, OverflowError) as error:
        line = str(error).split("\n", 1)[0]
        raise WakefulError(
            f"{place} is of another model: no tensor has the sizes in the configuration ({line})"
        ) from None


def check_shapes(
    described: Mapping[str, torch.Tensor], stored: Mapping[str, tuple[int, ...]], place: Path
) -> None:
    """Raise `WakefulError` unless the stored tensors are those of the model described."""
    if stored.keys() != described.keys():
        odd = sorted(stored.keys() ^ described.keys())
        raise WakefulError(f"{place} is of another model: {odd[0]!r} is in only one of the two")
    for name, tensor in described.items():
        if stored[name] != tensor.shape:
            raise WakefulError(
                f"{place} is of another model: {name!r} has shape {stored[name]} there and "
                f"{tuple(tensor.shape)} here"
            )
