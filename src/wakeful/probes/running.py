"""Functions for models of any class: their logits, its blocks, its depth.

This is the one place that knows our decoder from a model of Transformers.
"""

import re
import sys
from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.paged import stored_tensor

_PROBED = 8
"""Number of tokens on which causality is checked."""


def as_decoder(model: nn.Module) -> Decoder | None:
    """Return the model if it is our decoder, and None if it is one of Transformers.

    Raises:
        WakefulError: it is neither.
    """
    if isinstance(model, Decoder):
        return model
    modeling = sys.modules.get("transformers.modeling_utils")  # imported with any of its models
    if modeling is not None and isinstance(model, modeling.PreTrainedModel):
        return None
    if _is_of_peft(model):
        raise WakefulError(
            f"{type(model).__name__} is peft's: take what its merge_and_unload() returns, or to "
            "measure a model that is still trained, its get_base_model()"
        )
    raise WakefulError(
        f"{type(model).__name__} is neither a wakeful Decoder nor a Transformers model"
    )


def refuse_adapters(model: nn.Module) -> None:
    """Raise `WakefulError` where peft has put adapters into a model."""
    for name, module in model.named_modules():
        if _is_of_peft(module):
            raise WakefulError(
                f"{name} is a {type(module).__name__} of peft, an adapter beside the weights: take "
                "the model that peft's merge_and_unload() returns"
            )


def _is_of_peft(module: nn.Module) -> bool:
    return type(module).__module__.partition(".")[0] == "peft"


def logits_of(model: nn.Module, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "B L V"]:
    """Return the logits at each token, which predict the next one."""
    states, head = states_of(model, tokens)
    return head(states)


def states_of(
    model: nn.Module, tokens: Int[Tensor, "B L"]
) -> tuple[Float[Tensor, "B L C"], nn.Module]:
    """Return (states, head) with head(states) the logits.

    For our decoder they are its last hidden states and its head, so that a caller can apply the
    head to few positions. For a model of Transformers, and for a decoder that caps its logits after
    the head, they are the logits and the identity.
    """
    decoder = as_decoder(model)
    if decoder is not None:
        if decoder.config.logit_cap:
            return decoder(tokens), nn.Identity()
        return decoder.hidden(tokens), decoder.head
    return model(input_ids=tokens, use_cache=False).logits, nn.Identity()


def blocks_of(model: nn.Module) -> nn.ModuleList:
    """Return the list of blocks of a model, ours or one of Transformers."""
    if (decoder := as_decoder(model)) is not None:
        return decoder.blocks
    from wakeful.probes.huggingface import decoder_blocks  # noqa: PLC0415 - Transformers takes seconds to import

    return decoder_blocks(model, num_layers_of(model))  # pyright: ignore[reportArgumentType]


def named_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Return the model's blocks in their order, by their names."""
    names = {module: name for name, module in model.named_modules()}
    return {names[block]: block for block in blocks_of(model)}


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of memory, or of mapped files, behind tensors; a storage that several
    share counts once.
    """
    storages = (stored_tensor(tensor.detach()).untyped_storage() for tensor in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def is_quantized(model: nn.Module) -> bool:
    """Tell whether layers or the cache of a model hold quantized values."""
    return any(getattr(module, "holds_quantized_values", False) for module in model.modules())


def num_layers_of(model: nn.Module) -> int:
    """Return the number of blocks that the model's configuration gives."""
    decoder = as_decoder(model)
    if decoder is not None:
        return decoder.config.num_layers
    return model.config.get_text_config(decoder=True).num_hidden_layers  # pyright: ignore


@torch.no_grad()
def check_causal(name: str, model: nn.Module) -> None:
    """Raise `WakefulError` if a change of the last token changes the logits of earlier tokens.

    `name` stands in the message. Our decoder is causal by construction, and is not run. Nor is a
    quantized model, which was checked before it was quantized: scales that are computed from a
    whole sequence change all its logits a little.
    """
    if as_decoder(model) is not None or is_quantized(model):
        return
    embedding = model.get_input_embeddings()  # pyright: ignore[reportCallIssue]
    assert isinstance(embedding, nn.Module)
    weight = next(embedding.parameters())
    tokens = (torch.arange(2 * _PROBED, device=weight.device) % weight.shape[0]).view(2, _PROBED)
    tokens[1, :-1] = tokens[0, :-1]  # two texts that differ in the last token alone
    if int(tokens[0, -1]) == int(tokens[1, -1]):  # the vocabulary is too small for that
        return
    logits, other_logits = logits_of(model, tokens)[:, :-1].float()
    tolerance = 1e-5 if weight.dtype in (torch.float32, torch.float64) else 1e-2
    if float((logits - other_logits).abs().max()) > tolerance * float(logits.abs().max()):
        raise WakefulError(
            f"{name} is not causal: a {type(model).__name__} whose tokens see those after them "
            "gives a text no likelihood (is_decoder is not set in its configuration?)"
        )


def block_paths(model: nn.Module) -> dict[str, tuple[int | None, str]]:
    """Return for each module, by its name, (index of its block, its name inside the block).

    For a module outside the blocks, and for a block itself, it is (None, the whole name).
    """
    blocks = blocks_of(model)
    names = {id(module): name for name, module in model.named_modules()}
    inside_block = re.compile(re.escape(names[id(blocks)]) + r"\.(\d+)\.(.+)")
    paths: dict[str, tuple[int | None, str]] = {}
    for name in names.values():
        match = inside_block.match(name)
        paths[name] = (int(match[1]), match[2]) if match else (None, name)
    return paths
