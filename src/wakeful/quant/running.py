"""What a measurement needs of a model: its logits, its blocks, its depth."""

import re

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.probes.huggingface import decoder_blocks


def logits_of(model: nn.Module, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
    """Return the logits of our decoder or of a Transformers model."""
    if isinstance(model, Decoder):
        return model(tokens)
    if isinstance(model, PreTrainedModel):
        return model(input_ids=tokens, use_cache=False).logits
    raise WakefulError(
        f"{type(model).__name__} is neither a wakeful Decoder nor a Transformers model"
    )


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Return the model's list of blocks."""
    if isinstance(model, Decoder):
        return model.blocks
    if isinstance(model, PreTrainedModel):
        return decoder_blocks(model, model.config.get_text_config(decoder=True).num_hidden_layers)
    raise WakefulError(
        f"{type(model).__name__} is neither a wakeful Decoder nor a Transformers model"
    )


def places(model: nn.Module) -> dict[str, tuple[int | None, str]]:
    """Return each module's block number (None outside the blocks) and its name in there."""
    blocks = blocks_of(model)
    names = {id(module): name for name, module in model.named_modules()}
    prefix = names[id(blocks)] + "."
    found: dict[str, tuple[int | None, str]] = {}
    for name in names.values():
        match = re.match(r"(\d+)\.(.+)", name[len(prefix) :]) if name.startswith(prefix) else None
        found[name] = (int(match[1]), match[2]) if match else (None, name)
    return found


def hidden(output: object) -> Tensor:
    """Return the hidden states among what a block returned."""
    return output if isinstance(output, torch.Tensor) else output[0]  # pyright: ignore
