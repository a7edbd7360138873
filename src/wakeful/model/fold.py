"""Parts that training has and the trained model can do without: the same function, plainer."""

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
    """Return the configuration of a decoder after folding: with the norm and embedding that remain
    once their scales are in the matrices.

    An embedding that changes so is no longer tied to the head.
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
    """Return a decoder with the same logits, with scales and projections multiplied into weights.

    All other weights are shared with `decoder`, which is not changed. If there is nothing to fold,
    `decoder` itself is returned.
    """
    config = folded_config(decoder.config)
    if config == decoder.config:
        return decoder
    new: dict[str, Tensor] = {}
    for name, module in decoder.named_modules():
        if isinstance(module, Norm):
            new |= {f"{name}.{part}": tensor for part, tensor in module.folded().items()}
    if decoder.embedding.folded_name:
        table, head = decoder.embedding.folded(decoder.embed.weight, decoder.head.weight)
        new |= {"embed.weight": table, "head.weight": head}
    changes = {"norm": config.norm, "embedding": config.embedding, "tied": config.tied}
    return rebuild_decoder(decoder, new, **changes)
