"""`narrow`: fewer heads and hidden channels in every layer, chosen by what they put out.

Importance, on tokens of text (Minitron, 2407.14679, section 2.2), of group g of the heads that
share a key and value, with u_h the output of head h, and of channel c of a feed-forward network
with hidden channels h_c:

    F_g = mean_i Σ_{h in g} ‖u_ih‖        F_c = mean_i |h_ic|

The most important ones stay, in their order, whole groups with all their queries. What is left out
is made up for in closed form: layer by layer, of each matrix that writes to the stream,

    Δ = argmin Σ w ‖(W + Δ) f − z‖² + λ ‖Δ‖²

with W the columns that stay, f what they read in the narrow model, and z what is missing from its
stream to the reference's behind the sublayer. The penalty holds on to what the model had learned.
Weights w and λ are those of bridges (`BridgeConfig`). Where a norm stands between the matrix and
the stream (`peri`, `reordered`), which takes out the length of what it reads, z is what the
reference's matrix gives and w is divided by ‖z‖². B batch, L tokens.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from wakeful.config.model import ModelConfig
from wakeful.config.schema import BridgeConfig, WidthConfig
from wakeful.config.tables import from_table
from wakeful.display import Passed, unseen
from wakeful.errors import WakefulError
from wakeful.heirs.bridge import check_bridge
from wakeful.heirs.equations import Equations, token_weights
from wakeful.heirs.stream import TextStream, behind_mlp
from wakeful.model.decoder import Decoder
from wakeful.model.finite import widened
from wakeful.training.setup import AS_IT_IS
from wakeful.variants import build

_WRITES = ("attention.out", "mlp.down")
"""The matrices of a block that write to the stream, in their order."""

_LAYERS = ("query", "key", "value", "out", "gate", "up", "down")
"""The linear layers of a block; what else has parameters has none of a head or a channel."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """The reference's parts in a narrow model's layers."""

    groups: int
    """Groups of heads that share a key and value."""
    of_groups: int
    """The reference's."""
    channels: int
    """Hidden channels of the feed-forward network."""
    of_channels: int
    """The reference's."""


def kept_of(config: ModelConfig, reference: ModelConfig) -> Kept:
    """Return the reference's parts in the layers of a narrow model."""
    return Kept(
        groups=config.shape.num_kv_heads,
        of_groups=reference.shape.num_kv_heads,
        channels=config.mlp_width,
        of_channels=reference.mlp_width,
    )


def kept_by(initial: Mapping[str, Any] | None) -> Kept | None:
    """Return run.json's record, under "initial", of a narrow heir; None where it has none."""
    width = (initial or {}).get("width")
    return None if width is None else from_table(Kept, width, record="run.json")


def narrow_config(config: ModelConfig, width: WidthConfig) -> ModelConfig:
    """Return a configuration with the shares of heads and channels that `width` keeps.

    Raises:
        WakefulError: a share leaves nothing out once it is rounded; a variant has weights or
            meanings by head or channel of its own.
    """
    shape = config.shape
    groups = _kept("heads", width.heads, shape.num_kv_heads)
    channels = _kept("mlp", width.mlp, config.mlp_width)
    if groups < shape.num_kv_heads:
        normalizer = build("normalizers", config.normalizer)
        normalizer.attach(shape)
        _check(config, "heads", route="own", stored_prefix=0, qk_norm_whole=False)
        if any(True for _ in normalizer.parameters()):
            _check(config, "heads", normalizer="softmax")
    if channels < config.mlp_width:
        _check(config, "mlp", mlp_rotation=False)
    return dataclasses.replace(
        config,
        num_heads=groups * (shape.num_heads // shape.num_kv_heads),
        num_kv_heads=groups,
        head_width=shape.head_width,
        mlp_width=channels,
    )


def _check(config: ModelConfig, what: str, **plain: object) -> None:
    """Raise `WakefulError` where `--width.WHAT` cuts through what a variant has."""
    for name, value in plain.items():
        if getattr(config, name) != value:
            raise WakefulError(
                f"model.{name} = {getattr(config, name)}: --width.{what} narrows a model with "
                f"{name} = {value} alone"
            )


@torch.no_grad()
def narrow(
    reference: Decoder,
    width: WidthConfig,
    tokens: Int[Tensor, "B L"],
    options: BridgeConfig | None = None,
    *,
    documents: Int[Tensor, "B L"] | None = None,
    autocast: AbstractContextManager[object] = AS_IT_IS,
    progress: Passed = unseen,
) -> Decoder:
    """Return a decoder with the most important heads and channels of the reference's layers.

    `options` say how what is left out is made up for; with `map = "none"` it is not. `documents`
    and `autocast` are as `bridge` takes them; `progress` hears of every layer, once as it is looked
    at and once as it is made up for.

    Raises:
        WakefulError: see `narrow_config`; the stream is not a plain sum.
    """
    options = options or BridgeConfig()
    config = narrow_config(reference.config, width)
    check_bridge(reference, "leave out --width and the baseline narrow")
    target = Decoder(config).to(reference.head.weight)
    theirs = TextStream(reference, tokens, documents, autocast)
    layers = range(config.num_layers)
    total = len(layers) * (1 if options.map == "none" else 2)
    kept: list[tuple[Tensor, Tensor]] = []
    for layer in layers:
        progress(layer, total)
        kept.append(_most_important(theirs, layer, config))
    for name, tensor in target.named_parameters():
        tensor.copy_(_chosen(name, reference.get_parameter(name), reference.config, kept))
    if options.map == "none":
        progress(total, total)
        return target
    ours, theirs = (TextStream(each, tokens, documents, autocast) for each in (target, reference))
    for layer in layers:
        progress(len(layers) + layer, total)
        ours.through(layer)
        theirs.through(layer)
        for name in _WRITES:
            _make_up(ours, theirs, name, options)
    progress(total, total)
    return target


def _kept(what: str, share: float, whole: int) -> int:
    """Return how many of `whole` the share `--width.WHAT` comes to; 0 and 1 are all."""
    kept = _rounded(share or 1.0, whole)
    if kept < whole or share in (0.0, 1.0):
        return kept
    units = {"heads": "groups of heads", "mlp": "hidden channels"}[what]
    if whole == 1:
        raise WakefulError(
            f"--width.{what} {share}: a layer has 1 of the {units}, which stays: leave it out"
        )
    # The share of all but one, in the fewest digits that come to it.
    digits = (round((whole - 1) / whole, count) for count in itertools.count(1))
    enough = next(each for each in digits if _rounded(each, whole) == whole - 1)
    raise WakefulError(
        f"--width.{what} {share} comes to all {whole} {units}: {enough} would leave out one; give "
        "that or less"
    )


def _rounded(share: float, whole: int) -> int:
    return max(1, round(share * whole))


def _most_important(
    stream: TextStream, layer: int, config: ModelConfig
) -> tuple[Int[Tensor, "G"], Int[Tensor, "C"]]:
    """Return the groups and channels of a layer that stay, ascending."""
    stream.through(layer)
    heads, channels = torch.zeros(()), torch.zeros(())
    for u, _, h, _ in _sublayers(stream):
        by_head = widened(u).unflatten(-1, (-1, config.shape.head_width)).norm(dim=-1)
        heads = heads.to(u.device) + by_head.double().sum((0, 1))
        channels = channels.to(u.device) + h.double().abs().sum((0, 1))
    groups = heads.unflatten(0, (-1, config.num_heads // config.shape.num_kv_heads)).sum(-1)
    return _largest(groups, config.shape.num_kv_heads), _largest(channels, config.mlp_width)


def _largest(figures: Tensor, count: int) -> Tensor:
    return figures.topk(count).indices.sort().values


def _chosen(
    name: str, tensor: Tensor, config: ModelConfig, kept: list[tuple[Tensor, Tensor]]
) -> Tensor:
    """Return the rows or columns of a parameter of the reference that stay."""
    parts = name.split(".")
    if parts[0] != "blocks" or len(parts) != 5 or parts[3] not in _LAYERS:
        return tensor
    groups, channels = kept[int(parts[1])]
    half, layer, what = parts[2:]
    axis = 1 if layer in ("out", "down") else 0
    if axis and what == "bias":
        return tensor
    if half == "mlp":
        return tensor.index_select(axis, channels)
    shape = config.shape
    size = shape.head_width
    if layer in ("query", "out"):
        size *= shape.num_heads // shape.num_kv_heads
    rows = (groups.unsqueeze(1) * size + torch.arange(size, device=groups.device)).flatten()
    return tensor.index_select(axis, rows)


def _sublayers(stream: TextStream) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield, part by part, what the next layer's two writing matrices read and put out."""
    block = stream.blocks[stream.layer]
    out, down = _WRITES
    for found, _ in stream.watched({name: block.get_submodule(name) for name in _WRITES}):
        yield *found[out], *found[down]


def _make_up(ours: TextStream, theirs: TextStream, name: str, options: BridgeConfig) -> None:
    """Solve for one writing matrix of the next layer anew, in place."""
    matrix = ours.blocks[ours.layer].get_submodule(name)
    assert isinstance(matrix, nn.Linear)
    weight = widened(matrix.weight)
    equations = Equations(weight.shape[1], weight.shape[0], weight.device)
    parts = zip(
        ours.states(), _sublayers(ours), theirs.states(), _sublayers(theirs), ours.firsts,
        strict=True,
    )  # fmt: skip
    first = name == _WRITES[0]
    normed = behind_mlp(ours.blocks[ours.layer]) is not None
    for stream, own, their_stream, their_own, firsts in parts:
        x, y = widened(stream), widened(their_stream)
        mine, full = ([widened(part) for part in each] for each in (own, their_own))
        f, made = (mine[0], full[1]) if first else (mine[2], full[3])
        if normed:
            behind, z = y, made
        else:
            # The stream behind the sublayer, without what this matrix adds, and the reference's.
            behind = (y + full[1]) if first else (y + full[1] + full[3])
            z = behind - (x if first else x + mine[1])
        if matrix.bias is not None:
            z = z - widened(matrix.bias)
        counted = ~firsts if options.first == "out" else torch.ones_like(firsts)
        f, z, behind, made = (part[counted] for part in (f, z, behind, made))
        weights = token_weights(behind, options)
        if normed:
            weights = weights / made.square().sum(1)
        equations.add(f, z - f @ weight.T, weights)
    matrix.weight.copy_(weight + equations.solved(options.ridge).T)
