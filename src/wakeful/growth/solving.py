"""What heirs are solved on: the training text's beginning, and what closed forms make of it."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from wakeful.config.schema import DataConfig, WidthConfig
from wakeful.data.order import documents_of
from wakeful.data.tokens import PreparedData
from wakeful.device import choose_device
from wakeful.growth.bridge import Bridged, bridge, rebridge, stayed
from wakeful.growth.layers import LayerMap
from wakeful.growth.narrow import narrow
from wakeful.growth.recipe import Recipe
from wakeful.model.decoder import Decoder
from wakeful.training.setup import autocast


def narrowed(recipe: Recipe, reference: Decoder, width: WidthConfig) -> Decoder:
    """Return the reference with fewer heads and channels, solved on the text's beginning."""
    device = choose_device(recipe.train.device)
    tokens, numbers = _text(recipe, recipe.width.tokens)
    reference.to(device)
    donor = narrow(
        reference, width, tokens, recipe.bridge, documents=numbers,
        autocast=autocast(recipe.train, device),
    ).cpu()  # fmt: skip
    reference.to("cpu")
    return donor


def _text(recipe: Recipe, most: int) -> tuple[Int[Tensor, "B L"], Int[Tensor, "B L"] | None]:
    """Return at most so many tokens of the training text's beginning, to solve on, and their
    documents' numbers where these do not see each other.
    """
    data, length = PreparedData.open(recipe.data.source), recipe.train.length
    most = min(most, recipe.data.max_tokens or data.train.num_tokens)
    tokens = beginning(data, max(1, most // length), length, bos=recipe.data.bos)
    return tokens, documents(tokens, data, recipe.data)


def documents(
    tokens: Int[Tensor, "B L"], data: PreparedData, config: DataConfig
) -> Int[Tensor, "B L"] | None:
    """Return the number of each token's document, None where attention crosses from one to the
    next.
    """
    return None if config.cross_documents else documents_of(tokens, data.train.end_of_text)


def beginning(data: PreparedData, rows: int, length: int, *, bos: bool) -> Int[Tensor, "B L"]:
    """Return the first rows of the training text, at most as many as there are.

    With `bos` each begins as training's windows then do: with BOS in the place of its first token.
    """
    rows = min(rows, data.train.num_tokens // length)
    tokens = torch.from_numpy(data.train.tokens[: rows * length].astype("int64"))
    tokens = tokens.view(rows, length)
    if bos:
        tokens[:, 0] = data.tokenizer.begin
    return tokens


def bridges(
    recipe: Recipe,
    reference: Decoder,
    layers: LayerMap,
    had: LayerMap | None,
    kept: Sequence[Bridged],
    heir: Decoder,
) -> list[Bridged]:
    """Bridge an heir's gaps on the training text's beginning, in place.

    Of an heir that had other layers before, and the bridges `kept`, only those gaps that it lacked
    then. Return all of its bridges in order of depth, with those that stayed.
    """
    if recipe.bridge.map == "none":
        return []
    tokens, numbers = _text(recipe, recipe.bridge.tokens)
    device = choose_device(recipe.train.device)
    reference.to(device)
    heir.to(device)
    context = autocast(recipe.train, device)
    if had is None:
        found = bridge(
            heir, reference, layers, tokens, recipe.bridge, documents=numbers, autocast=context
        )
    else:
        found = rebridge(
            heir, reference, layers, had, tokens, recipe.bridge, documents=numbers,
            autocast=context,
        )  # fmt: skip
        found += stayed(kept, layers, reference.config.num_layers)
        found.sort(key=lambda one: one.first)
    reference.to("cpu")
    heir.to("cpu")
    return found
