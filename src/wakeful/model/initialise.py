"""All initialisation, in one function."""

import hashlib
import math

import torch
from torch import nn

from wakeful.model.decoder import Decoder

_RESIDUAL_OUTPUTS = ("attention.out.weight", "mlp.down.weight")


@torch.no_grad()
def initialise(decoder: Decoder, seed: int) -> Decoder:
    """Give every parameter of a decoder its initial value, and return the decoder.

    Matrices and embeddings are normal with standard deviation `init_std` (the projections back
    into the residual stream divided by √(2N) where `scale_residual_init` says so), biases zero,
    norm scales one. A route's, depth mix's or normalizer's own parameters keep the start that
    their definition gives them.

    Each parameter draws from a generator seeded by (seed, its name), on the CPU: twins that differ
    in one part agree in every other parameter of the same name and shape, on any device.
    """
    config = decoder.config
    for name, parameter in decoder.named_parameters():
        if name.startswith(("route.", "depth.")) or ".normalizer." in name:
            continue
        if parameter.ndim == 1:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        std = config.init_std
        if config.scale_residual_init and name.endswith(_RESIDUAL_OUTPUTS):
            std /= math.sqrt(2 * config.num_layers)
        generator = torch.Generator().manual_seed(seed_of(seed, name))
        values = torch.empty(parameter.shape, dtype=torch.float32)
        nn.init.normal_(values, std=std, generator=generator)
        parameter.copy_(values)
    return decoder


def seed_of(seed: int, name: str) -> int:
    """Return the 63-bit seed of a named random stream."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
