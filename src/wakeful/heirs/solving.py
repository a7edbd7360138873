"""Closed forms of heirs, solved on windows that are spread over the training text."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from wakeful.config.schema import DataConfig, WidthConfig
from wakeful.data.base import Data
from wakeful.data.order import documents_of
from wakeful.data.preparing import load_data
from wakeful.device import choose_device
from wakeful.display import Passed, unseen
from wakeful.heirs.bridge import Bridged, gaps, rebridge, stayed
from wakeful.heirs.layers import LayerMap, first
from wakeful.heirs.narrow import narrow
from wakeful.heirs.recipe import Recipe
from wakeful.model.decoder import Decoder
from wakeful.training.setup import autocast


def narrowed_reference(
    recipe: Recipe, reference: Decoder, width: WidthConfig, progress: Passed = unseen
) -> Decoder:
    """Return the reference with fewer heads and channels, solved on the training text."""
    device = choose_device(recipe.train.device)
    tokens, numbers = _text(recipe, recipe.width.tokens)
    reference.to(device)
    donor = narrow(
        reference, width, tokens, recipe.bridge, documents=numbers,
        autocast=autocast(recipe.train, device), progress=progress,
    ).cpu()  # fmt: skip
    reference.to("cpu")
    return donor


def _text(recipe: Recipe, most: int) -> tuple[Int[Tensor, "B L"], Int[Tensor, "B L"] | None]:
    """Return at most so many tokens, spread over the training text, and their `documents`."""
    data, length = load_data(recipe.data), recipe.train.length
    tokens = spread(data, max(1, most // length), length, recipe.data)
    return tokens, documents(tokens, data, recipe.data)


def solved_on(recipe: Recipe, num_layers: int, data: Data) -> int:
    """Return the tokens that the reference goes through for one seed's matrices in closed form."""
    if recipe.drops > 1:
        heirs = [layers for layers, _ in recipe.parts(num_layers)]
    else:
        heirs = [recipe.layer_map(number) for number in range(recipe.rounds)]
    solves = recipe.bridge.map != "none"
    bridging = sum(bool(gaps(layers, num_layers)) for layers in heirs) * solves
    bridging += "at_once" in recipe.baselines and solves
    # Narrowing goes through the reference once to choose; to make up, through both models, twice
    # a layer.
    narrowing = (8 if solves else 2) * (bool(recipe.width) + ("narrow" in recipe.baselines))
    most = _allowed(data, recipe.data)
    return bridging * min(recipe.bridge.tokens, most) + narrowing * min(recipe.width.tokens, most)


def documents(
    tokens: Int[Tensor, "B L"], data: Data, config: DataConfig
) -> Int[Tensor, "B L"] | None:
    """Return the number of each token's document; None where documents see each other."""
    return None if config.cross_documents else documents_of(tokens, data.train.end_of_text)


def spread(data: Data, rows: int, length: int, config: DataConfig) -> Int[Tensor, "B L"]:
    """Return rows evenly spread over the training text, or over its first `max_tokens`.

    At most as many as it has; of a mixture each part's by its share. With `bos` each begins as
    training's windows then do: with BOS in the place of its first token.
    """
    starts = data.train.spread(rows, length, _allowed(data, config))
    tokens = torch.from_numpy(data.train.read(starts, length))
    bos = data.begin(config)
    if bos is not None:
        tokens[:, 0] = bos
    return tokens


def _allowed(data: Data, config: DataConfig) -> int:
    return min(data.train.num_tokens, config.max_tokens or data.train.num_tokens)


def bridges(
    recipe: Recipe,
    reference: Decoder,
    layers: LayerMap,
    had: LayerMap | None,
    kept: Sequence[Bridged],
    heir: Decoder,
    progress: Passed,
) -> list[Bridged]:
    """Bridge an heir's gaps on the training text, in place.

    Of an heir that had other layers before, and the bridges `kept`, only those gaps that it lacked
    then. Return all of its bridges in order of depth, with those that stayed.
    """
    if recipe.bridge.map == "none":
        return []
    tokens, numbers = _text(recipe, recipe.bridge.tokens)
    device, total = choose_device(recipe.train.device), reference.config.num_layers
    reference.to(device)
    heir.to(device)
    found = rebridge(
        heir, reference, layers, had or first(total, of=total), tokens, recipe.bridge,
        documents=numbers, autocast=autocast(recipe.train, device), progress=progress,
    )  # fmt: skip
    reference.to("cpu")
    heir.to("cpu")
    return sorted([*found, *stayed(kept, layers, total)], key=lambda one: one.first)
