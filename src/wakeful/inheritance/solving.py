"""Bridges of heirs, solved on windows spread over the training text."""

import torch
from jaxtyping import Int
from torch import Tensor

from wakeful.config.schema import DataConfig
from wakeful.data.base import Data
from wakeful.data.order import number_documents
from wakeful.data.preparing import load_data
from wakeful.device import choose_device
from wakeful.inheritance.bridge import bridge
from wakeful.inheritance.layers import LayerMap
from wakeful.inheritance.recipe import Recipe
from wakeful.model.decoder import Decoder
from wakeful.runs.records import BridgeGap
from wakeful.terminal.display import OnProgress
from wakeful.training import autocast


def spread_windows(data: Data, rows: int, length: int, config: DataConfig) -> Int[Tensor, "B L"]:
    """Return at most `rows` sequences of `length` tokens, evenly spread over the training text, or
    over its first `config.max_tokens` tokens.

    Each part of a mixture has as many sequences as its share. With `config.bos`, BOS replaces the
    first token of each sequence, as in training.
    """
    allowed = min(data.train.num_tokens, config.max_tokens or data.train.num_tokens)
    starts = data.train.spread_starts(rows, length, allowed)
    tokens = torch.from_numpy(data.train.read(starts, length))
    bos = data.window_bos(config)
    if bos is not None:
        tokens[:, 0] = bos
    return tokens


def bridge_on_text(
    recipe: Recipe, reference: Decoder, layers: LayerMap, heir: Decoder, progress: OnProgress
) -> list[BridgeGap]:
    """Bridge an heir's gaps, in place, by maps that are solved on windows of the training text;
    return the bridges, [] if the recipe has none.

    Both models are moved to the training device, and are on the CPU afterwards.
    """
    if recipe.bridge.map == "none":
        return []
    data, length = load_data(recipe.data), recipe.train.length
    tokens = spread_windows(data, max(1, recipe.bridge.tokens // length), length, recipe.data)
    device = choose_device(recipe.train.device)
    reference.to(device)
    heir.to(device)
    document_numbers = None
    if not recipe.data.cross_documents:  # tokens attend within their document alone
        document_numbers = number_documents(tokens, data.train.end_of_text)
    solved = bridge(
        heir, reference, layers, tokens, recipe.bridge, documents=document_numbers,
        autocast=autocast(recipe.train, device), progress=progress,
    )  # fmt: skip
    reference.to("cpu")
    heir.to("cpu")
    return solved
