"""Bridges of heirs, solved on windows spread over the training text."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from wakeful.config.schema import DataConfig
from wakeful.data.base import Data
from wakeful.data.order import documents_of
from wakeful.data.preparing import load_data
from wakeful.device import choose_device
from wakeful.inheritance.bridge import rebridge, remaining_bridges
from wakeful.inheritance.layers import LayerMap, first
from wakeful.inheritance.recipe import Recipe
from wakeful.model.decoder import Decoder
from wakeful.runs.records import BridgeGap
from wakeful.terminal.display import OnProgress
from wakeful.training import autocast


def document_numbers(
    tokens: Int[Tensor, "B L"], data: Data, config: DataConfig
) -> Int[Tensor, "B L"] | None:
    """Return the number of each token's document; None where documents see each other."""
    return None if config.cross_documents else documents_of(tokens, data.train.end_of_text)


def spread_windows(data: Data, rows: int, length: int, config: DataConfig) -> Int[Tensor, "B L"]:
    """Return rows evenly spread over the training text, or over its first `max_tokens`.

    At most as many as it has; of a mixture each part's by its share. With `bos` BOS replaces the
    first token of each, as in training's windows.
    """
    allowed = min(data.train.num_tokens, config.max_tokens or data.train.num_tokens)
    starts = data.train.spread(rows, length, allowed)
    tokens = torch.from_numpy(data.train.read(starts, length))
    bos = data.begin(config)
    if bos is not None:
        tokens[:, 0] = bos
    return tokens


def bridges(
    recipe: Recipe,
    reference: Decoder,
    layers: LayerMap,
    old_layers: LayerMap | None,
    old_bridges: Sequence[BridgeGap],
    heir: Decoder,
    progress: OnProgress,
) -> list[BridgeGap]:
    """Bridge an heir's gaps on the training text, in place.

    Of an heir that has grown from `old_layers` with `old_bridges`, only the gaps that are new.
    Return all of its bridges, old and new, in order of depth.
    """
    if recipe.bridge.map == "none":
        return []
    data, length = load_data(recipe.data), recipe.train.length
    tokens = spread_windows(data, max(1, recipe.bridge.tokens // length), length, recipe.data)
    device, total = choose_device(recipe.train.device), reference.config.num_layers
    reference.to(device)
    heir.to(device)
    new_bridges = rebridge(
        heir, reference, layers, old_layers or first(total, of=total), tokens, recipe.bridge,
        documents=document_numbers(tokens, data, recipe.data),
        autocast=autocast(recipe.train, device), progress=progress,
    )  # fmt: skip
    reference.to("cpu")
    heir.to("cpu")
    return sorted(
        [*new_bridges, *remaining_bridges(old_bridges, layers, total)],
        key=lambda bridge: bridge.first,
    )
