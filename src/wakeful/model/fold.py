"""Folding: scales and projections of norms and embeddings multiplied into the matrices beside them.

The decoder computes the same function with fewer parts.
"""

import dataclasses

import torch
from torch import Tensor

from wakeful.config.model import ModelConfig
from wakeful.embeddings import Embedding
from wakeful.model.decoder import Decoder
from wakeful.model.rebuild import rebuild_decoder
from wakeful.norms.base import Norm
from wakeful.variants import build


def folded_config(config: ModelConfig) -> ModelConfig:
    """Return the configuration of the decoder that `folded` returns: a norm or an embedding that
    can be folded is replaced by a simpler one.

    The head is no longer tied if the embedding is folded: the two matrices then differ.
    """
    norm: Norm = build("norms", config.norm)
    embedding: Embedding = build("embeddings", config.embedding)
    return dataclasses.replace(
        config,
        norm=norm.folded_name or config.norm,
        embedding=embedding.folded_name or config.embedding,
        tied=config.tied and not embedding.folded_name,
    )


@torch.no_grad()
def folded(decoder: Decoder) -> Decoder:
    """Return a decoder with the same logits but simpler norms and a simpler embedding, whose scales
    and projections are multiplied into weights.

    All other weights are shared with `decoder`, which is not changed. If there is nothing to fold,
    `decoder` itself is returned.
    """
    config = folded_config(decoder.config)
    if config == decoder.config:
        return decoder
    new: dict[str, Tensor] = {}
    for name, module in decoder.named_modules():
        if isinstance(module, Norm):  # folded() is {} if it cannot be folded
            new |= {f"{name}.{part}": tensor for part, tensor in module.folded().items()}
    if decoder.embedding.folded_name:
        table, head = decoder.embedding.folded(decoder.embed.weight, decoder.head.weight)
        new |= {"embed.weight": table, "head.weight": head}
    changes = {"norm": config.norm, "embedding": config.embedding, "tied": config.tied}
    return rebuild_decoder(decoder, new, **changes)
