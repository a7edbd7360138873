"""Decoders with random initial weights, or with none.

The numbers in a configuration of unknown origin decide how much time and memory its model takes.
Here they are compared with the tensors in its weight files before anything is built.
"""

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError, first_line
from wakeful.model.decoder import Decoder
from wakeful.variants.roles import Start, role_of


@torch.no_grad()
def initialize(decoder: Decoder, seed: int) -> Decoder:
    """Initialize all parameters of a new decoder in place, and return the decoder.

    A parameter's role decides: matrices and embeddings are normal with standard deviation
    `init_std`, divided by √(2N) for projections back into the residual stream if
    `scale_residual_init` is set; biases are zero; a few matrices are orthogonal. All other
    parameters keep the values that their modules gave them. A matrix on the meta device, which has
    no memory, is left for `fill`.

    Each parameter is drawn on the CPU by a generator that is seeded with (seed, its name). So two
    decoders that differ in one part agree in every other parameter of the same name and shape.
    """
    for name, parameter in decoder.named_parameters():
        if parameter.is_meta:
            continue
        values = _initial_values(decoder.config, name, parameter, seed)
        if values is not None:
            parameter.copy_(values)
    return decoder


@torch.no_grad()
def fill(decoder: Decoder, seed: int) -> Decoder:
    """Give memory and initial values to the matrices that a decoder, built in `without_matrices`,
    has on the meta device. Return the decoder, which is changed in place.

    Inside `torch.device("meta")`, where nothing is to have memory, the decoder is unchanged.
    """
    if torch.get_default_device().type == "meta":
        return decoder
    for name, parameter in list(decoder.named_parameters()):
        if parameter.is_meta:
            values = _initial_values(decoder.config, name, parameter, seed)
            assert values is not None, name  # only matrices that are drawn lack memory
            set_parameter(decoder, name, values.to(parameter.dtype))
    return decoder


def set_parameter(decoder: Decoder, name: str, values: torch.Tensor) -> None:
    """Replace the parameter `name` of a decoder by a new one with these values; a tied head gets
    the embedding's.
    """
    owner, _, key = name.rpartition(".")
    setattr(decoder.get_submodule(owner), key, nn.Parameter(values))
    if name == "embed.weight" and decoder.config.tied:
        decoder.head.weight = decoder.embed.weight


def _initial_values(
    config: ModelConfig, name: str, parameter: nn.Parameter, seed: int
) -> torch.Tensor | None:
    """Return a parameter's initial values in float32; None if its module has set them.

    Its role decides on the distribution, and (seed, name) on the random numbers.
    """
    role = role_of(parameter)
    if role is None or role.start == "defined":
        return None
    if role.start == "zeros":
        return torch.zeros(parameter.shape)
    generator = torch.Generator().manual_seed(seed_of(seed, name))
    values = torch.empty(parameter.shape, dtype=torch.float32)
    if role.start == "orthogonal":
        return nn.init.orthogonal_(values, generator=generator)
    return nn.init.normal_(values, std=deviation(config, role.start), generator=generator)


def deviation(config: ModelConfig, start: Start) -> float:
    """Return the standard deviation of the initial values of a matrix that starts "normal" or
    "residual": `init_std`; for "residual", init_std / √(2N) if `scale_residual_init` is set.
    """
    if start == "residual" and config.scale_residual_init:
        return config.init_std / math.sqrt(2 * config.num_layers)
    return config.init_std


def seed_of(seed: int, name: str) -> int:
    """Return a 63-bit seed, by a hash of `seed` and `name`: one for each name."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def build_on_meta(config: ModelConfig, num_tensors: int, source: Path) -> Decoder:
    """Return a decoder of a configuration on the meta device, where weights take no memory.

    Raises:
        WakefulError: the configuration has more layers than the file `source` has tensors
            (`num_tensors`), or no tensor can have its sizes.
    """
    if config.num_layers > num_tensors:
        raise WakefulError(
            f"{source} is of another model: it has {num_tensors} tensors, and the configuration "
            f"{config.num_layers} layers"
        )
    try:
        with torch.device("meta"):
            return Decoder(config)
    except (RuntimeError, TypeError, OverflowError) as error:
        raise WakefulError(
            f"{source} is of another model: no tensor has the sizes in the configuration "
            f"({first_line(error)})"
        ) from None


def check_shapes(
    described: Mapping[str, torch.Tensor], stored: Mapping[str, tuple[int, ...]], source: Path
) -> None:
    """Raise `WakefulError` unless the names and shapes of the tensors `stored` in the file `source`
    are those of a model's own tensors (`described`).
    """
    if stored.keys() != described.keys():
        unpaired = sorted(stored.keys() ^ described.keys())  # names that only one of them has
        raise WakefulError(
            f"{source} is of another model: {unpaired[0]!r} is in only one of the two"
        )
    for name, tensor in described.items():
        if stored[name] != tensor.shape:
            raise WakefulError(
                f"{source} is of another model: {name!r} has shape {stored[name]} there and "
                f"{tuple(tensor.shape)} here"
            )
