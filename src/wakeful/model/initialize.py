"""All initialization, in one function."""

import hashlib
import math

import torch
from torch import nn

from wakeful.config.model import ModelConfig
from wakeful.model.decoder import Decoder
from wakeful.roles import Start, role_of


@torch.no_grad()
def initialize(decoder: Decoder, seed: int) -> Decoder:
    """Give every parameter of a new decoder its initial value, and return the decoder.

    By their roles: matrices and embeddings are normal with standard deviation `init_std` (the
    projections back into the residual stream divided by √(2N) where `scale_residual_init` says so),
    biases zero; everything else keeps the start that its module gave it.

    Each parameter draws from a generator seeded by (seed, its name), on the CPU: twins that differ
    in one part agree in every other parameter of the same name and shape, on any device.
    """
    config = decoder.config
    for name, parameter in decoder.named_parameters():
        role = role_of(parameter)
        if role is None or role.start == "defined":
            continue
        if role.start == "zeros":
            parameter.zero_()
            continue
        std = deviation(config, role.start)
        generator = torch.Generator().manual_seed(seed_of(seed, name))
        values = torch.empty(parameter.shape, dtype=torch.float32)
        nn.init.normal_(values, std=std, generator=generator)
        parameter.copy_(values)
    return decoder


def deviation(config: ModelConfig, start: Start) -> float:
    """Return the standard deviation of a matrix that starts "normal" or "residual"."""
    scaled = start == "residual" and config.scale_residual_init
    return config.init_std / math.sqrt(2 * config.num_layers) if scaled else config.init_std


def seed_of(seed: int, name: str) -> int:
    """Return the 63-bit seed of a named random stream."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
