"""Layers left out of a Transformers folder: any architecture, file by file, no weight computed.

Of a model that holds more than a language model, such as one that sees, its text decoder's layers.

A tensor of block i goes along under the number that the block has among those that stay, stored as
it is (quantized ones too). Lists with an entry a layer and lists of layers follow. Whether a block
is still what it was is not trusted to the configuration's names: both models are built without
memory for weights, and a block whose parameters or settings differ at its new place is refused.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from wakeful.errors import WakefulError, warn
from wakeful.guard import guarded
from wakeful.hf.checkpoint_reader import Shards, read_config
from wakeful.hf.read_back import Unreadable, read_back
from wakeful.hf.transforms import FIELD, transforms_of
from wakeful.hf.weights_out import (
    SHARD,
    copy_tokenizer,
    create_folder,
    write_config,
    write_generation,
    write_tensors,
)
from wakeful.probes.huggingface import decoder_blocks

_NUMBERS = ("layer_idx", "layer_index", "layer_id", "idx", "block_idx", "layer_number")
"""Attributes of modules that hold the block's index."""
_LISTS_OF_LAYERS = ("mlp_only_layers", "moe_layers", "attn_layer_indices", "full_attn_idxs")
"""Fields that name layers by their numbers."""
_OVERRIDES = ("per_layer_config",)
"""Fields that say by a layer's number what it has apart from the others."""
_ONE_EACH = ("indexer_types",)
"""Fields with an entry for each layer whose names do not say so."""
_FIRST_LAYERS = ("first_k_dense_replace", "max_window_layers", "num_dense_layers")
"""Fields that count layers from the first on."""
_LAST_LAYERS = ("num_kv_shared_layers",)
"""Fields that count layers up to the last."""
_BEYOND = "num_nextn_predict_layers"
"""The field that counts blocks behind the last layer, which predict later tokens."""
_SLICED = {"embed_tokens_per_layer.weight": 1, "per_layer_model_projection.weight": 0}
"""Tensors outside the blocks with a slice for each layer, side by side in this dimension."""
_DIVIDED = ("scale_attn_by_inverse_layer_idx",)
"""Fields by which a layer's number enters what it computes."""
_SHARES, _STORES = "self_attn.is_kv_shared_layer", "self_attn.store_full_length_kv"
"""Attributes: a layer reads another's keys and values; a layer stores its own for others."""
_LINEAR = "linear_attention"
"""Value in `layer_types` of a layer with recurrent attention."""


def drop_layers(
    folder: Path, layers: Sequence[int], out: Path, *, shard: str = SHARD, card: str = "",
) -> str:  # fmt: skip
    """Write the model of a Transformers folder with these layers alone; return its `model_type`.
    It is read back before it has its name, where the folder it was made of can be read.

    Raises:
        WakefulError: a layer that it lacks or a wrong order; a layer that would be of another kind
            at its new place; a folder that cannot be read or written.
    """
    config = read_config(folder)
    if transforms_of(config):
        raise WakefulError(
            f"layers of {folder}, which has a {FIELD}, cannot be left out: one of them holds the "
            "matrix of all; leave them out of the model that was quantized"
        )
    text = text_config(config)
    _check(layers, text)
    total = text.num_hidden_layers
    full_model = _skeleton(config)
    blocks = _blocks_name(full_model)
    shorter = shorten_config(config, layers)
    shorter_model = _skeleton(shorter)
    _compare(full_model, shorter_model, layers)
    sliced = _compare_rest(full_model, shorter_model)
    places = _places(text, layers)
    with create_folder(out, card) as part, Shards(folder) as tensors:
        kept_tensors = dict(
            renumber_blocks(tensors, blocks, full_model.base_model_prefix, places, total)
        )
        for end in sliced:
            kept_tensors |= _slices(kept_tensors, end, layers, total)
        write_tensors(kept_tensors, part, shard)
        write_generation(part, copy_tokenizer(folder, part))
        write_config(shorter, part)
        _read_back(part, folder)
    return config.model_type


def _read_back(part: Path, source: Path) -> None:
    """Read back what was copied of a folder, where that can be read itself.

    Raises:
        WakefulError: the folder can be read, and what was copied cannot.
    """
    try:
        read_back(part, None)
    except Unreadable as error:
        try:
            read_back(source, None)
        except Unreadable:
            warn(f"{source} cannot be read, nor what is copied of it: {error.why}")
        else:
            raise


def shorten_config(config: PreTrainedConfig, layers: Sequence[int]) -> PreTrainedConfig:
    """Return the configuration of a model of these layers alone.

    Raises:
        WakefulError: the architecture has none.
    """
    text = text_config(config)
    if text is config:
        changed, block = _changed_fields(config, layers), _BLOCK
    else:
        part = _part_of(config, text)
        assert part is not None
        changed, block = {part: shorten_config(text, layers).to_dict()}, _TEXT_BLOCK
    table = config.to_dict()
    if quantized := table.get("quantization_config"):  # a whole's names other parts' blocks too
        changed["quantization_config"] = _renumber_entries(quantized, _places(text, layers), block)
    failure = f"no {config.model_type} can be described that has the layers {[*layers]} alone"
    with guarded(failure):
        return type(config).from_dict(table | changed)


def _changed_fields(config: PreTrainedConfig, layers: Sequence[int]) -> dict[str, Any]:
    """Return the fields of a configuration that change when only these layers are kept."""
    table, total = config.to_dict(), config.num_hidden_layers
    depth = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    changed: dict[str, Any] = {depth: len(layers)}
    for name, value in table.items():
        if name in _LISTS_OF_LAYERS and isinstance(value, list):
            changed[name] = [layers.index(layer) for layer in value if layer in layers]
        elif name in _OVERRIDES and isinstance(value, dict):
            by_layer = {int(number): entry for number, entry in value.items()}
            changed[name] = {
                n: by_layer[layer] for n, layer in enumerate(layers) if layer in by_layer
            }
        elif name in _FIRST_LAYERS and type(value) is int:
            changed[name] = sum(layer < value for layer in layers)
        elif name in _LAST_LAYERS and type(value) is int:
            changed[name] = sum(layer >= total - value for layer in layers)
        elif (
            ("layer" in name or name in _ONE_EACH)
            and isinstance(value, list)
            and len(value) == total
        ):
            changed[name] = [value[layer] for layer in layers]
    if {"attention_types", "attention_layers"} <= table.keys():  # GPT-Neo: one is made of the other
        changed["attention_types"] = [[changed["attention_layers"], 1]]
    return changed


def text_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration of the text decoder: the whole one, or a part of it.

    Raises:
        WakefulError: it is a part that the whole does not name, or has an encoder.
    """
    text = config.get_text_config(decoder=True)
    if text is not config and (config.is_encoder_decoder or _part_of(config, text) is None):
        raise WakefulError(
            f"{config.model_type} keeps its language model where layers cannot be left out"
        )
    return text


def _part_of(config: PreTrainedConfig, text: PreTrainedConfig) -> str | None:
    parts = (name for name in config.sub_configs if getattr(config, name, None) is text)
    return next(parts, None)


def renumber_blocks(
    tensors: Mapping[str, Tensor], blocks: str, base: str, places: Mapping[int, int], total: int
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that stay, under their new names.

    Args:
        tensors: those of a checkpoint.
        blocks: name of the model's list of blocks. Checkpoints have it with or without `base`
            before it; older ones of a model with a language model inside name the base after
            that: language_model.model.layers.
        base: the model's base_model_prefix.
        places: new index of each block that stays, by its old one; blocks past the last layer
            (next-token predictors) may be missing from the checkpoint.
        total: number of layers in the configuration.

    Raises:
        WakefulError: the checkpoint has other blocks than the configuration says.
    """
    bare = blocks.removeprefix(f"{base}.")
    part, _, rest = bare.partition(".")
    older = rf"|{re.escape(part)}\.{re.escape(base)}\.{re.escape(rest)}" if "." in bare else ""
    names = rf"(?:{re.escape(base)}\.)?{re.escape(bare)}{older}"
    pattern = re.compile(rf"((?:{names})\.)(\d+)(\..+)")
    numbers: set[int] = set()
    for name in tensors:
        match = pattern.fullmatch(name)
        if match is None:
            yield name, tensors[name]
            continue
        numbers.add(int(match[2]))
        new_number = places.get(int(match[2]))
        if new_number is not None:
            yield f"{match[1]}{new_number}{match[3]}", tensors[name]
    beyond = {number for number in places if number >= total}
    if numbers - beyond != set(range(total)):
        raise WakefulError(
            f"the checkpoint names tensors of {len(numbers)} blocks {blocks}.N, and the "
            f"configuration says {total}: it is not whole, or names its tensors in another way"
        )


def _places(config: PreTrainedConfig, layers: Sequence[int]) -> dict[int, int]:
    """Return the new numbers of the blocks that stay: these layers, and behind the last layer those
    that predict later tokens.
    """
    total, count = config.num_hidden_layers, getattr(config, _BEYOND, None) or 0
    return {old: new for new, old in enumerate([*layers, *range(total, total + count)])}


def check_order(layers: Sequence[int]) -> None:
    """Raise `WakefulError` unless the layers to keep are in ascending order without repetition."""
    if not layers or any(later <= early for early, later in itertools.pairwise(layers)):
        raise WakefulError(f"name the layers to keep in their order, each once, got {[*layers]}")


def _check(layers: Sequence[int], config: PreTrainedConfig) -> None:
    check_order(layers)
    total = config.num_hidden_layers
    if layers[0] < 0 or layers[-1] >= total:
        raise WakefulError(f"the model has the layers 0 to {total - 1}, got {[*layers]}")
    kinds = getattr(config, "layer_types", None) or []
    if {kinds[layer] for layer in layers if kinds} == {_LINEAR}:
        raise WakefulError(
            f"{[*layers]} have linear attention alone, and Transformers' cache needs a layer "
            f"with another: keep one of {[n for n, kind in enumerate(kinds) if kind != _LINEAR]}"
        )
    for name in _DIVIDED:
        if getattr(config, name, False):
            raise WakefulError(
                f"{name} is set: what a layer computes depends on its number, and it would get "
                "another; wakeful inherit rescales its queries"
            )


def _skeleton(config: PreTrainedConfig) -> PreTrainedModel:
    build = partial(AutoModelForCausalLM.from_config, trust_remote_code=False)
    if config.get_text_config(decoder=True) is not config:  # it would build the text part alone
        named = getattr(transformers, (config.architectures or [""])[0], None)
        build = getattr(named, "_from_config", build)
    with guarded("no model can be built of the configuration"), torch.device("meta"):
        return build(config)


def _blocks_name(model: PreTrainedModel) -> str:
    """Return the name of the list of blocks."""
    text = model.config.get_text_config(decoder=True)
    decoder = model if text is model.config else model.get_decoder()
    blocks = decoder_blocks(decoder, text.num_hidden_layers)
    return next(name for name, module in model.named_modules() if module is blocks)


def _compare(full_model: PreTrainedModel, shorter: PreTrainedModel, layers: Sequence[int]) -> None:
    """Raise `WakefulError` unless every block is at its new place what it was at the old."""
    before = full_model.get_submodule(_blocks_name(full_model))
    after = shorter.get_submodule(_blocks_name(shorter))
    assert isinstance(before, nn.ModuleList)
    assert isinstance(after, nn.ModuleList)
    described = [
        (dict(_describe_block(before[layer])), dict(_describe_block(after[position])))
        for position, layer in enumerate(layers)
    ]
    # Some releases of Transformers let the last layer of a kind store what no layer shares.
    read = any(settings.get(_SHARES) == "True" for pair in described for settings in pair)
    for position, (layer, (old, new)) in enumerate(zip(layers, described, strict=True)):
        for name in old | new:
            if old.get(name) != new.get(name) and (read or name != _STORES):
                raise WakefulError(
                    f"layer {layer} would be another kind of layer as layer {position}: its "
                    f"{name} is {old.get(name)}, and would be {new.get(name)}"
                )


def _compare_rest(full_model: PreTrainedModel, shorter: PreTrainedModel) -> list[str]:
    """Return the ends of the names of tensors outside the blocks that hold a slice for each layer.

    Raises:
        WakefulError: one depends on the number of layers in a way that is not known.
    """
    blocks, ends = f"{_blocks_name(full_model)}.", []
    after = {name: tensor.shape for name, tensor in shorter.state_dict().items()}
    for name, tensor in full_model.state_dict().items():
        if name.startswith(blocks) or after.get(name) == tensor.shape:
            continue
        end = ".".join(name.split(".")[-2:])
        if end not in _SLICED:
            raise WakefulError(
                f"{name} depends on the number of layers, in a way that is not known here"
            )
        ends.append(end)
    return ends


def _slices(
    tensors: Mapping[str, Tensor], end: str, layers: Sequence[int], total: int
) -> dict[str, Tensor]:
    """Return the tensors whose names end so, with what they hold of these layers alone."""
    module, where = end.removesuffix("weight"), _SLICED[end]
    sliced = [name for name in tensors if f".{module}" in f".{name}"]
    for name in sliced:
        if not name.endswith(end) or tensors[name].shape[where] % total:
            raise WakefulError(
                f"the tensor {name} has shape {tuple(tensors[name].shape)}, in which no slice for "
                f"each of {total} layers is known"
            )
    chunks = {name: tensors[name].chunk(total, where) for name in sliced}
    return {name: torch.cat([chunk[n] for n in layers], where) for name, chunk in chunks.items()}


def _describe_block(block: nn.Module) -> Iterator[tuple[str, str]]:
    """Give what makes a block what it is: parts, shapes and settings, but not its number."""
    for name, module in block.named_modules():
        yield name, type(module).__name__
        for key, value in vars(module).items():
            simple = value is None or isinstance(value, bool | int | float | str)
            if simple and not key.startswith("__") and key not in _NUMBERS:
                yield f"{name}.{key}".lstrip("."), repr(value)
    for name, tensor in block.state_dict().items():
        yield name, f"{tuple(tensor.shape)} {tensor.dtype}"


def _renumber_entries(value: Any, places: Mapping[int, int], block: re.Pattern[str]) -> Any:
    """Renumber the blocks in a table's keys and strings; entries of dropped blocks are removed."""
    if isinstance(value, dict):
        return {
            _renumber_entries(key, places, block): _renumber_entries(entry, places, block)
            for key, entry in value.items()
            if _stays(key, places, block)
        }
    if isinstance(value, list):
        return [
            _renumber_entries(entry, places, block)
            for entry in value
            if _stays(entry, places, block)
        ]
    if isinstance(value, str):
        return block.sub(lambda at: f"{at[1]}{places.get(int(at[2]), at[2])}", value, count=1)
    return value


def _stays(entry: Any, places: Mapping[int, int], block: re.Pattern[str]) -> bool:
    match = block.search(entry) if isinstance(entry, str) else None
    return match is None or int(match[2]) in places


# Some of these texts are patterns, in which a dot is escaped.
_BLOCK = re.compile(r"(\b(?:layers|h|blocks)\\?\.)(\d+)(?=\\?\.|$)")
_TEXT_BLOCK = re.compile(
    r"(\blanguage_model\\?\.(?:model\\?\.)?(?:layers|h|blocks)\\?\.)(\d+)(?=\\?\.|$)"
)
