"""`rotate`: the same function in another basis of the residual stream, where no channel stands out.

With Q orthogonal of the model's width, every matrix that reads the stream becomes W Qᵀ, every one
that writes to it Q W, every embedding's row e Qᵀ: each state x is then x Qᵀ, and an RMSNorm without
a scale a channel commutes with that (SliceGPT, 2401.15024, section 3; QuaRot, 2404.00456). Scales
are first multiplied into what reads the norm. A LayerNorm also takes the mean out, so the states
are made free of their mean (the same function: nothing else reads it) and Q keeps the direction
(1, …, 1): the mean stays zero, and the LayerNorm does what an RMSNorm does.

Values turn too: V R and W_o Rᵀ with one R of the heads' width, under the attention's weights, which
mix tokens and no channels. RoPE lies between what queries and keys are made of and where they meet,
so a rotation of theirs is done as the model runs (`rotate_keys`), as is one of hidden channels. All
products are in float64 and rounded once.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.attention import Heads
from wakeful.model.block import Block
from wakeful.model.decoder import Decoder
from wakeful.model.finite import check_logits
from wakeful.model.fold import folded
from wakeful.model.rebuild import rebuild_decoder
from wakeful.model.turned import WalshHadamard
from wakeful.norms.base import Norm
from wakeful.optim.rotations.base import Identity, LearnedRotation, Rotation, rotation_of
from wakeful.paged import parameters_in_memory, split_rows, stored_tensor
from wakeful.parts.orthoadam import generator_for
from wakeful.routes.base import ValueRoute
from wakeful.variants.roles import Role, roles_of

Turning = Callable[[Tensor], Tensor]
_CHANNELS = {"stream": "residual stream's channels", "values": "values' channels"}
_OF_HEADS = ("query", "key")
_CLOSE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.3, torch.float16: 0.1}
"""Largest difference of the logits, over their deviation, that rounding explains."""


@torch.no_grad()
def rotate(
    decoder: Decoder,
    rotation: Rotation | str = "hadamard",
    *,
    stream: bool = True,
    values: bool = True,
    inner: bool = False,
    seed: int = 0,
) -> Decoder:
    """Return a decoder with the same logits whose residual stream has another basis.

    With an orthogonal Q, matrices that read the stream become W Qᵀ, those that write to it Q W,
    embeddings e Qᵀ. Before that the scales of norms are multiplied into the matrices that read them
    (SliceGPT, 2401.15024, section 3; QuaRot, 2404.00456).

    Args:
        decoder: is not changed. The result shares no weights with it; without `stream` it shares
            those outside the blocks.
        rotation: kind of rotation.
        stream: whether to rotate the residual stream. Without it norms may have any placement.
        values: whether to rotate every head's values.
        inner: whether to rotate the inputs of the feed-forward networks' last projections. This is
            done in every forward pass, so the result's architecture is none of Transformers'.
        seed: seeds random rotations.

    Raises:
        WakefulError: a part of the model, which is named, does not commute with a rotation.
    """
    kind = check_rotates(decoder, rotation, stream=stream, values=values)
    stream = stream and type(kind) is not Identity
    inner = inner and not decoder.config.mlp_rotation  # they may be rotated already
    plain = folded(decoder) if decoder.embedding.folded_name else decoder
    # At first with the same parameters: `parameters_in_memory` copies those that are changed.
    turned = copy.deepcopy(plain, {id(p): p for p in plain.parameters()}).eval()
    if stream:
        _untie_head(turned)
    norms = _stream_norms(turned) if stream else []
    centered = any(norm.centers for norm in norms)
    readers, roles = (list(_stream_readers(turned)), roles_of(turned)) if stream else ([], {})
    shape, device = turned.config.shape, turned.embed.weight.device
    of_stream = kind if stream else Identity()
    turn = make_turn(of_stream, "stream", shape.width, device, seed=seed, centered=centered)
    turn_values = make_turn(kind, "values", shape.head_width, device, seed=seed)
    for names in _all_parts(turned) if stream else _blocks(turned):
        modules = [turned.get_submodule(name[:-1]) for name in names]
        inside = {module for part in modules for module in part.modules()}
        with parameters_in_memory(*modules):
            for norm, reading in readers:
                if norm in inside:
                    _fold_norm(norm, reading)
            for name, role in roles.items():
                if role.residual is not None and name.startswith(names):
                    _turn_matrix(turned, name, role, turn, centered=centered)
            for norm in norms:  # a bias that a norm has kept lies in the stream
                bias = getattr(norm, "bias", None) if norm in inside else None
                if bias is not None:
                    bias.copy_(turn(bias.double()))
            for part in modules:
                if isinstance(part, Block) and values:
                    _turn_values(part, turned, turn_values)
                if isinstance(part, Block) and inner:  # undoes the rotation of its inputs
                    down = part.mlp.down.weight
                    down.copy_(WalshHadamard()(down.double()))
    if inner:
        turned = rebuild_decoder(turned, mlp_rotation=True)
    _check_logits_kept(decoder, turned, kind)
    return turned


@torch.no_grad()
def rotate_keys(decoder: Decoder) -> Decoder:
    """Return a decoder with the same logits that rotates queries and keys after RoPE.

    It does so in every forward pass, so that its architecture is none of Transformers'. It shares
    its weights with `decoder`, which is not changed.

    Raises:
        WakefulError: the logits change, as the model's route uses queries or keys for more than
            logits.
    """
    stored_keys: dict[str, Tensor] = {}
    if decoder.config.stored_prefix and not decoder.config.qk_rotation:
        # A stored prefix's keys are not computed in the forward pass: they are rotated here.
        for name, keys in decoder.named_parameters():
            if name.endswith("attention.stored.keys"):
                stored_keys[name] = WalshHadamard()(keys.double()).to(keys.dtype)
    turned = rebuild_decoder(decoder, stored_keys, qk_rotation=True)
    _check_logits_kept(decoder, turned, "a rotation of queries and keys")
    return turned


def check_rotates(
    decoder: Decoder, rotation: Rotation | str, *, stream: bool = True, values: bool = True
) -> Rotation:
    """Return the rotation, which may be given as an expression, after a check that the decoder's
    residual stream (if `stream`) and every head's values (if `values`) can be rotated by it.

    Raises:
        WakefulError: the rotation is learned, or a part of the model, which is named, treats single
            channels of what is rotated.
    """
    kind = rotation_of(rotation)
    if isinstance(kind, LearnedRotation):
        raise WakefulError(
            f"{kind} is learned from gradients, which a cure does not have: "
            "use another, such as hadamard"
        )
    if isinstance(kind, Identity):  # nothing is rotated
        stream = values = False
    if stream:
        _check_stream(decoder)
    # What the routes and the depth mix do to single channels.
    operations_by_field: list[tuple[str, Mapping[Any, str]]] = [
        ("route", part.single_channels())
        for part in decoder.route.modules()
        if isinstance(part, ValueRoute)
    ]
    operations_by_field.append(("depth", decoder.depth.single_channels()))
    is_rotated = {"stream": stream, "values": values}
    for field, operations in operations_by_field:
        for basis, operation in operations.items():  # such as "stream", "has gates for each of"
            if is_rotated.get(basis):
                raise WakefulError(
                    f"model.{field} = {getattr(decoder.config, field)} {operation} the "
                    f"{_CHANNELS[basis]}, so no other basis of them gives the same function"
                )
    return kind


def _check_stream(decoder: Decoder) -> None:
    """Raise `WakefulError` if a part of the model would be another function after a rotation of
    the residual stream.
    """
    config = decoder.config
    layers = range(config.num_layers)
    if any(decoder.placement.at(layer, config.num_layers) != "before" for layer in layers):
        raise WakefulError(
            f"model.placement = {config.placement}: a norm after a sublayer scales channels of the "
            "residual stream itself, so no other basis gives the same function; rotate what lies "
            "inside of the blocks: --rotate_values, --rotate_inner, --rotate_keys"
        )
    # A norm with a scale that can be taken out of it overrides this method.
    if type(decoder.norm).take_scale_and_bias is Norm.take_scale_and_bias:
        raise WakefulError(
            f"model.norm = {config.norm} does more with channels than scale what it puts out, so "
            "no other basis gives the same function"
        )
    normalizer = next(iter(decoder.blocks)).attention.dot.normalizer  # all blocks have the same
    parts = {"route": decoder.route, "depth": decoder.depth, "normalizer": normalizer}
    for field, part in parts.items():
        if any(role.residual is not None for role in roles_of(part).values()):
            raise WakefulError(
                f"model.{field} = {getattr(config, field)} reads the residual stream with matrices "
                "of its own, which `rotate` does not turn yet"
            )


def _all_parts(decoder: Decoder) -> Iterator[tuple[str, ...]]:
    """Yield the parts in which a decoder is rotated, one after another to save memory: for each,
    the prefixes of its parameters' names, such as ("blocks.0.",).

    Modules that share a parameter, or that have to be changed together, are in one part.
    """
    yield from _blocks(decoder)
    if decoder.config.tied:  # the embedding's weight is the head's
        yield ("embed.", "norm.", "head.")
    else:
        yield ("embed.",)
        yield ("norm.", "head.")
    yielded = {"blocks", "embed", "norm", "head"}
    # All other modules, such as the routes', are one part.
    yield tuple(f"{name}." for name, _ in decoder.named_children() if name not in yielded)


def _blocks(decoder: Decoder) -> Iterator[tuple[str]]:
    for index in range(len(decoder.blocks)):
        yield (f"blocks.{index}.",)


def _untie_head(decoder: Decoder) -> None:
    """Give a tied head a parameter of its own, if the final norm has a scale, which will be
    multiplied into the head and not into the embedding. Change the configuration accordingly.
    """
    if not decoder.config.tied or not decoder.norm.scales_channels:
        return
    decoder.head.weight = nn.Parameter(decoder.embed.weight.detach(), requires_grad=False)
    decoder.config = dataclasses.replace(decoder.config, tied=False)


def _stream_readers(decoder: Decoder) -> Iterator[tuple[Norm, list[nn.Linear]]]:
    """Yield each norm of the residual stream with the linear layers that read its output."""
    for block in decoder.blocks:
        for norm, sublayer in (
            (block.attention_norm, block.attention),
            (block.mlp_norm, block.mlp),
        ):
            # It is no Identity: a placement without norms before sublayers was refused.
            yield cast(Norm, norm), list(_reading_layers(sublayer))
    yield decoder.norm, [decoder.head]


def _reading_layers(sublayer: nn.Module) -> Iterator[nn.Linear]:
    """Yield the linear layers of a sublayer that read the residual stream."""
    for name, role in roles_of(sublayer).items():
        if role.residual == 1:  # the stream lies along the axis of a matrix's inputs
            yield sublayer.get_submodule(name.rpartition(".")[0])  # pyright: ignore[reportReturnType]


def _fold_norm(norm: Norm, readers: list[nn.Linear]) -> None:
    """Move a norm's scale γ and bias β into the linear layers that read its output n γ + β, in
    place: W (γ n + β) + b = W γ n + (W β + b).

    If any of these `readers` has no bias b, only γ is moved, and the norm keeps the bias β / γ:
    W γ (n + β / γ).

    Raises:
        WakefulError: the norm has to keep β / γ, and γ is zero in a channel.
    """
    scale, bias = norm.take_scale_and_bias()  # sets γ to 1 and β to 0 in the norm
    if bias is not None:
        if all(reader.bias is not None for reader in readers):
            for reader in readers:
                reader.bias.copy_(reader.bias.double() + reader.weight.double() @ bias.double())
        else:
            assert scale is not None
            if not scale.all():
                raise WakefulError(
                    f"the norm before {type(readers[0]).__name__} has a scale of zero in a "
                    "channel, and what reads it has no bias that could take over the norm's"
                )
            norm.bias.copy_(bias.double() / scale.double())  # pyright: ignore
    if scale is not None:
        for reader in readers:
            for rows in split_rows(reader.weight):  # a float64 copy of all rows may be too large
                rows.copy_(rows.double() * scale.double())


def make_turn(
    kind: Rotation, part: str, width: int, device: torch.device, *, seed: int,
    centered: bool = False,
) -> Turning:  # fmt: skip
    """Return a function that maps x (..., `width`) to x Qᵀ, with Q a rotation of this kind.

    `part` ("stream" or "values") enters the random seed. If `centered`, Q keeps the direction
    (1, …, 1), so that LayerNorms, which subtract the mean, commute with it: Q is U diag(1, R) U,
    with a rotation R of `width` − 1 channels and the reflection U of `_exchange_axes`.
    """
    num_rotated = width - 1 if centered else width
    rotation = kind.for_width(
        num_rotated, generator=generator_for(seed, part, width), device=device,
        dtype=torch.float64,
    )  # fmt: skip

    def turn(x: Tensor) -> Tensor:
        """Return x Qᵀ for `x` of any shape (..., `width`)."""
        rows = x.reshape(-1, width)
        if not centered:
            return rotation.into(rows).reshape(x.shape)
        rows = _exchange_axes(rows)  # the first axis, which R leaves alone, is now (1, …, 1) / √n
        rows = torch.cat([rows[:, :1], rotation.into(rows[:, 1:].contiguous())], dim=1)
        return _exchange_axes(rows).reshape(x.shape)

    return turn


def turning_of(decoder: Decoder, rotation: str = "hadamard", *, seed: int = 0) -> Turning:
    """Return the function that maps a decoder's hidden states after any block to those of the same
    decoder after `rotate`.

    Raises:
        WakefulError: a rotation would change the logits.
    """
    kind = check_rotates(decoder, rotation)
    centered = any(norm.centers for norm in _stream_norms(decoder))
    width, device = decoder.config.width, decoder.embed.weight.device
    turn = make_turn(kind, "stream", width, device, seed=seed, centered=centered)
    if not centered:
        return turn
    # LayerNorms subtract the mean anyway, so `rotate` takes it out of the states.
    return lambda hidden: turn(hidden - hidden.mean(-1, keepdim=True))


def _stream_norms(decoder: Decoder) -> list[Norm]:
    """Return the norms of the residual stream: all but those of queries and keys."""
    return [
        module
        for module in decoder.modules()
        if isinstance(module, Norm) and module.spec.part not in _OF_HEADS
    ]


def _exchange_axes(rows: Float[Tensor, "M n"]) -> Float[Tensor, "M n"]:
    """Return x U for each row x, where the reflection U exchanges the first axis and the direction
    (1, …, 1) / √n.
    """
    width = rows.shape[1]
    # U = I − 2 w wᵀ, with w along the difference of the two.
    normal = torch.full((width,), -1 / math.sqrt(width), dtype=rows.dtype, device=rows.device)
    normal[0] += 1
    normal /= normal.norm()
    return rows - 2 * (rows @ normal).unsqueeze(1) * normal


def _turn_matrix(decoder: Decoder, name: str, role: Role, turn: Turning, *, centered: bool) -> None:
    """Rotate the matrix `name` of a decoder in place, by `turn`, along its axis in the residual
    stream: the outputs, with their bias, if it writes to the stream, else the inputs.

    If `centered`, the mean over channels is first taken out of what is written to the stream:
    LayerNorms subtract it anyway.
    """
    weight = decoder.get_parameter(name)
    writes = role.residual == 0  # axis 0 of (out, in) lies in the stream
    views = list(split_rows(weight.T if writes else weight))  # in parts, to save memory
    bias = getattr(decoder.get_submodule(name.rpartition(".")[0]), "bias", None)
    if writes and bias is not None:
        views.append(bias)
    for view in views:
        rows = view.double()
        if centered and (writes or role.embedding):  # an embedding's rows are written to it too
            rows = rows - rows.mean(-1, keepdim=True)
        view.copy_(turn(rows))


def _turn_values(block: Block, decoder: Decoder, turn: Turning) -> None:
    """Rotate every head's values in a block by one matrix R, in place, and the output projection's
    inputs by the same R, so that the block's output does not change.

    `turn` rotates vectors of a head's width. The values of a stored prefix are rotated too.
    """
    width = decoder.config.shape.head_width
    value, out = block.attention.value, block.attention.out
    if isinstance(value, Heads):  # else the layer borrows another layer's values
        # The weight is (heads · width, D): `turn` needs each head's width as the last axis.
        rows = value.weight.double().unflatten(0, (-1, width)).transpose(1, 2)
        value.weight.copy_(turn(rows).transpose(1, 2).flatten(0, 1))
        if value.bias is not None:
            value.bias.copy_(turn(value.bias.double()))
    out.weight.copy_(turn(out.weight.double()))
    if decoder.config.stored_prefix:
        stored_values = block.attention.stored.values
        if stored_values is not None:
            stored_values.copy_(turn(stored_values.double()))


def _check_logits_kept(before: Decoder, after: Decoder, kind: Rotation | str) -> None:
    """Raise `WakefulError` if the logits differ `before` and `after` a rotation `kind`, as they do
    if a variant of the user's own does not commute with it.
    """
    config = before.config
    check_same(
        before, after, before.embed.weight, stored_tensor(before.embed.weight).dtype, "the logits",
        f"under {kind}: model.route = {config.route}, model.depth = {config.depth} or model.norm = "
        f"{config.norm} does not commute with a rotation",
        length=min(64, config.context),
    )  # fmt: skip


def check_same(
    before: Callable[[Tensor], Tensor], after: Callable[[Tensor], Tensor], table: Tensor,
    dtype: torch.dtype, noun: str, why: str, *, length: int = 64,
) -> None:  # fmt: skip
    """Raise `WakefulError` if two models' logits for random tokens differ by more than rounding to
    `dtype` explains.

    `before` and `after` take token ids and return logits; `table` is their embedding, which gives
    the vocabulary and the device. `length` tokens are compared. The message is
    "{noun} change by ... {why}".
    """
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(len(table), (1, length), generator=generator).to(table.device)
    expected, actual = before(tokens).float(), after(tokens).float()
    check_logits(expected)
    difference = (actual - expected).square().mean().sqrt().item()
    deviation = expected.std().item()
    if not difference <= _CLOSE[dtype] * deviation:  # true for a NaN too
        raise WakefulError(f"{noun} change by {difference:.1e} of {deviation:.1e} {why}")
