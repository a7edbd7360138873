"""Rotation of a model before its layers are quantized: the same function, whose weights have fewer
outliers (QuaRot, 2404.00456), so that 4 bits lose less.

Whether a rotation helps depends on the model, so it is measured. Each candidate is quantized to one
format, and compared with the unrotated model in the same format by KL from full precision.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from transformers import PreTrainedModel

from wakeful import surgery
from wakeful.errors import WakefulError
from wakeful.estimates import confidence_interval
from wakeful.hf.families import FAMILIES
from wakeful.hf.weights_out import stock_architecture
from wakeful.loading.model import Model
from wakeful.model.decoder import Decoder
from wakeful.optim.rotations.base import LearnedRotation, rotation_of
from wakeful.probes.experts import is_fused
from wakeful.quantization.convert import linear_layers
from wakeful.quantization.format_search import FormatSearch
from wakeful.quantization.rotation_choice import RotationChoice
from wakeful.quantization.schemes import Scheme

AUTO = "auto"
VALUES = "values"


@dataclass(frozen=True, eq=False)
class SearchedModel:
    """A model, perhaps rotated, and the search for the formats of its layers."""

    model: Model
    search: FormatSearch


def check_rotation_name(name: str) -> None:
    """Raise `WakefulError` if a model cannot be rotated by this name: it is neither `AUTO` nor
    `VALUES` nor a rotation, or a learned one.
    """
    if name not in (AUTO, VALUES) and isinstance(rotation_of(name), LearnedRotation):
        raise WakefulError(f"rotation = {name!r} is learned by training: name another, or auto")


def candidate_rotations(scheme: Scheme) -> tuple[str, ...]:
    """Return the rotations that `AUTO` tries before a scheme: of every head's values alone, and of
    the residual stream too, as a whole and in blocks as wide as the scheme's groups.

    Blocks that coincide with groups spread an outlier over the numbers that share its scale alone.
    """
    group = scheme.weights.group if scheme.weights is not None else 0
    blocks = (f"block_diagonal(size={group})",) if group else ()
    return (VALUES, "hadamard", *blocks)


def skip_in_decoder(decoder: Decoder, patterns: Sequence[str]) -> tuple[str, ...]:
    """Return patterns of a Transformers model's layers as names of the layers of the decoder that
    it was converted to.

    A pattern that matches none of the Transformers model's layers stays as it is.
    """
    family = FAMILIES[stock_architecture(decoder.config)[0]]
    layers = linear_layers(decoder)
    names: dict[str, None] = {}
    for pattern in patterns:
        matched = {
            decoder_name.rpartition(".")[0]: None
            for link in family.links(decoder.config)
            if fnmatchcase(family.checkpoint_name(link.hf_name).rpartition(".")[0], pattern)
            for decoder_name in link.decoder_names
        }
        matched = {name: None for name in matched if name in layers}
        names |= matched or {pattern: None}
    return tuple(names)


def rotate_model(loaded: Model, rotation: str) -> Model:
    """Return a model with the same function whose residual stream and values are rotated, or, for
    `VALUES`, every head's values alone.

    Weights that differ are rounded to the type of the model's files. The module is our decoder, or,
    for a mixture of experts, one of Transformers' models.

    Args:
        loaded: the model, which stays as it is.
        rotation: `VALUES` or the expression of a rotation.

    Raises:
        WakefulError: the model cannot be converted to our decoder, a part of it does not commute
            with the rotation, or a weight is too large for its type.
    """
    kind, stream = ("hadamard", False) if rotation == VALUES else (rotation, True)
    if isinstance(loaded.module, PreTrainedModel) and any(map(is_fused, loaded.module.modules())):
        original = loaded.module
        rotated = surgery.rotate_experts(loaded.module, kind, stream=stream)
    else:
        loaded = loaded.as_decoder_model()
        original = loaded.decoder()
        rotated = surgery.rotate(original, kind, stream=stream)
    surgery.round_changed(rotated, original, loaded.stored)
    return replace(loaded, module=rotated, path=None, generation_source=loaded)


def choose_rotation(
    unrotated: FormatSearch, rotate: Callable[[str], SearchedModel]
) -> tuple[RotationChoice, SearchedModel | None]:
    """Choose the rotation after which one format of all layers loses least; return the choice and
    the rotated model, None if there is no rotation.

    The format is the search's `nearest_uniform_format`, the loss is KL from the unrotated model on
    the selection text. The least is chosen if the 95% interval of its paired difference from no
    rotation is below zero; otherwise none is. A rotation is refused if it adds bytes, as one of the
    residual stream does where the head is tied to the embedding.

    Args:
        unrotated: the search for the formats of the model as it is.
        rotate: returns the model after the named rotation; raises `WakefulError` if it cannot be
            rotated so.
    """
    format_name = unrotated.nearest_uniform_format
    kl = {"": unrotated.uniform_kl(format_name)}
    refused: dict[str, str] = {}
    best, best_model = "", None
    for rotation in candidate_rotations(unrotated.engine.schemes[format_name]):
        rotated = None  # the last one's memory is needed
        try:
            rotated = rotate(rotation)
        except WakefulError as error:
            refused[rotation] = str(error)
            continue
        if (added := rotated.search.model_bytes - unrotated.model_bytes) > 0:
            refused[rotation] = f"it adds {added / 1e6:,.1f} MB to the file"
            continue
        kl[rotation] = rotated.search.uniform_kl(format_name)
        if _sum_kl(kl[rotation]) < _sum_kl(kl[best]):
            best, best_model = rotation, rotated
    choice = RotationChoice("", format_name, kl, refused)
    if not best:
        return choice, None
    _, high = confidence_interval(*choice.difference(best), len(kl[""]))
    if high < 0:
        return replace(choice, name=best), best_model
    return choice, None  # it may be chance, or there is one sequence only, without an interval


def _sum_kl(values: Sequence[float]) -> float:
    """Return the sum of KL over sequences; infinity if it is not finite."""
    total = sum(values)
    return total if math.isfinite(total) else math.inf
