"""Weights out: a decoder as a folder that `AutoModelForCausalLM.from_pretrained` loads."""

import json
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from wakeful.config.model import ModelConfig
from wakeful.data.tokenizer import CONFIG, GENERATION, Tokenizer, special_ids_around, token_ids
from wakeful.errors import WakefulError
from wakeful.guard import wrap_errors
from wakeful.hf.checkpoint_reader import (
    INDEX_FILE,
    PAD,
    SINGLE_FILE,
    corrected_config,
    pad_token_with_row,
    suppress_warnings,
    to_file_type,
)
from wakeful.hf.code import AUTO_MAP, write_code
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.families import FAMILIES, STOCK
from wakeful.hf.families.base import canonical_config
from wakeful.hf.read_back import embedding_rows, read_back
from wakeful.model.decoder import Decoder
from wakeful.model.fold import folded, folded_config
from wakeful.paged import is_finite
from wakeful.paths import temporary_path_beside
from wakeful.runs.run import disk_errors, save_tensors

SHARD = "2GB"
"""Largest file of weights, which is held in memory while it is written."""
_ID_FIELDS = ("bos_token_id", "eos_token_id", PAD)
_TOKENIZER_PARTS = ("normalizer", "pre_tokenizer", "model", "decoder")
Ids = dict[str, int | list[int] | None]
_MATCH_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized")


def export_decoder(
    decoder: Decoder,
    folder: str | Path,
    *,
    tokenizer: Tokenizer,
    dtype: torch.dtype = torch.float32,
    types: Mapping[str, torch.dtype] | None = None,
    shard: str = SHARD,
    card: str = "",
) -> str:
    """Write a decoder as a Transformers folder, whole or not at all; return its `model_type`.

    The model is written as a stock architecture, if the decoder is exactly one once the scales of
    its norms are multiplied into its matrices (`folded`), and if Transformers reads the tokenizer
    beside it; else as our own class with its code, for `trust_remote_code=True`. Weights are
    rounded to `dtype`; with `types` none is rounded (see `to_file_type`). A file of weights holds
    at most `shard`. `card` becomes README.md. The written folder is loaded and compared with the
    decoder before it gets its name (`read_back`).

    Raises:
        WakefulError: the folder exists, or it cannot be written or read back.
    """
    model_type, config, tokenizer = architecture_to_write(decoder.config, tokenizer)
    tensors = hf_tensors(decoder, model_type, dtype, types)
    config.dtype = dtype
    with create_folder(Path(folder), card) as temporary_folder:
        write_texts(tokenizer, temporary_folder, config, decoder.config.vocab_size)
        if model_type == WakefulConfig.model_type:
            config.auto_map = AUTO_MAP  # pyright: ignore[reportAttributeAccessIssue]
            write_code(decoder, temporary_folder)
        write_config(config, temporary_folder)
        write_tensors(tensors, temporary_folder, shard)
        read_back(temporary_folder, decoder, tokenizer=tokenizer)
    return model_type


def save_stock(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    tokenizer: Tokenizer,
    dtype: torch.dtype | None,
    types: Mapping[str, torch.dtype] | None = None,
    card: str = "",
) -> str:
    """Write a Transformers model as a folder of its own architecture, whole or not at all; return
    its `model_type`.

    Weights are rounded to `dtype` (None: the model's type); with `types` none is rounded (see
    `to_file_type`). `card` becomes README.md. The written folder is loaded and compared with the
    model before it gets its name (`read_back`).

    Raises:
        WakefulError: the folder exists, it cannot be read back, or Transformers reads another
            tokenizer beside it.
    """
    config = corrected_config(model)
    config.dtype = dtype or model.dtype
    written_tokenizer = readable_tokenizer(tokenizer, config)
    if written_tokenizer is None:
        raise WakefulError(f"Transformers reads another tokenizer beside a {config.model_type}")
    buffers = dict(model.named_buffers())  # such as a router's correction, which is never rounded
    tensors = {
        name: tensor if name in buffers else to_file_type(tensor, name, config.dtype, types)
        for name, tensor in model.state_dict().items()
    }
    with create_folder(Path(folder), card) as temporary_folder:
        with suppress_warnings():
            model.save_pretrained(temporary_folder, state_dict=tensors, max_shard_size=SHARD)
        context, rows = config.max_position_embeddings, embedding_rows(model)
        ids = write_tokenizer(written_tokenizer, temporary_folder, context, rows)
        write_generation(temporary_folder, ids)
        write_config(config, temporary_folder)
        read_back(temporary_folder, model, tokenizer=written_tokenizer)
    return config.model_type


def architecture_to_write(
    config: ModelConfig, tokenizer: Tokenizer
) -> tuple[str, PreTrainedConfig, Tokenizer]:
    """Choose the architecture to write a decoder as; return its `model_type`, its configuration and
    the tokenizer to write beside it.

    It is the architecture of Transformers that computes the same function, if there is one and
    Transformers, which chooses a tokenizer's class by the architecture, would read the tokenizer
    back unchanged. Otherwise it is our own class.

    Raises:
        WakefulError: Transformers would read the tokenizer back changed with either.
    """
    for model_type, hf_config in (stock_architecture(config), _wakeful_architecture(config)):
        written_tokenizer = readable_tokenizer(tokenizer, hf_config)
        if written_tokenizer is not None:
            return model_type, hf_config, written_tokenizer
    raise WakefulError(
        "the tokenizer cannot be written: Transformers reads another one of its files; give the "
        "model one that Transformers loads"
    )


def stock_architecture(config: ModelConfig) -> tuple[str, PreTrainedConfig]:
    """Return the `model_type` and configuration of the Transformers architecture that computes the
    same function as the decoder; those of our own class where there is none.

    The decoder is taken as it is after folding, when the scales of its norms are multiplied into
    its matrices. A family of architectures has a nearest configuration for every decoder: it is the
    same model if it converts back to the decoder's configuration.
    """
    folded_decoder_config = folded_config(config)
    expected = canonical_config(folded_decoder_config)
    for family in STOCK:
        hf_config = family.to_hf_config(folded_decoder_config)
        try:
            converted_back = family.from_hf_config(hf_config, 0)
        except WakefulError:  # our decoder cannot be that model at all
            continue
        if canonical_config(converted_back) == expected:
            names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[hf_config.model_type]
            hf_config.architectures = [names if isinstance(names, str) else names[0]]
            return hf_config.model_type, hf_config
    return _wakeful_architecture(config)


def _wakeful_architecture(config: ModelConfig) -> tuple[str, PreTrainedConfig]:
    return WakefulConfig.model_type, WakefulConfig.of(config, architectures=["WakefulForCausalLM"])


def hf_tensors(
    decoder: Decoder,
    model_type: str,
    dtype: torch.dtype,
    types: Mapping[str, torch.dtype] | None = None,
) -> dict[str, Tensor]:
    """Return a decoder's weights by their names in checkpoints of the architecture `model_type`, in
    the types that `to_file_type` chooses from `dtype` and `types`.

    Raises:
        WakefulError: a value is not finite in its type.
    """
    family = FAMILIES[model_type]
    if model_type != WakefulConfig.model_type:
        decoder = folded(decoder)  # stock architectures lack scales and projections of ours
    decoder_tensors = dict[str, Tensor](decoder.named_parameters(remove_duplicate=False))
    # A constant sink of softmax-1 is a buffer, and is stored where others have a learned one.
    decoder_tensors |= decoder.named_buffers(remove_duplicate=False)
    tensors: dict[str, Tensor] = {}
    for link in family.links(decoder.config):
        name = family.checkpoint_name(link.hf_name)
        joined = link.join([decoder_tensors[part].detach() for part in link.decoder_names])
        tensors[name] = to_file_type(joined, name, dtype, types).contiguous()
        if not is_finite(tensors[name]):
            raise WakefulError(
                f"{name} has a value that is not finite in {str(dtype).removeprefix('torch.')}: "
                "choose dtype float32"
            )
    return tensors


def write_config(config: PreTrainedConfig, folder: Path) -> None:
    """Write config.json, with RoPE's parameters also in the fields that older readers know.

    Transformers 5 writes them as `rope_parameters`. A reader that knows `rope_theta` alone (mlx-lm
    0.32, Transformers 4) would silently use a base of 10,000. `output_attentions` is set to False,
    in `config` too: Transformers refuses to write it beside SDPA.
    """
    vars(config)["_output_attentions"] = False
    config.save_pretrained(folder)
    file = folder / "config.json"
    table = json.loads(file.read_text("utf-8"))
    text_table = table.get("text_config")  # of a model that also reads images
    rope_tables = [
        part
        for part in (table, text_table)
        if isinstance(part, dict) and part.get("rope_parameters")
    ]
    for part in rope_tables:
        part.update(_older_rope_fields(part["rope_parameters"], part["model_type"]))
    if rope_tables:
        file.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", "utf-8")


def _older_rope_fields(rope: dict[str, Any], model_type: str) -> dict[str, Any]:
    """Convert Transformers 5's `rope_parameters` to fields of Transformers 4: `rope_theta`,
    `partial_rotary_factor` (a GPT-NeoX has other names for these two) and `rope_scaling`.

    Where layers with full and with sliding attention have a RoPE each, each base has its own field.
    """
    base_fields = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
    if rope.keys() & base_fields:  # one table per type of layer
        fields = {
            name: rope[layer_type]["rope_theta"]
            for layer_type, name in base_fields.items()
            if layer_type in rope
        }
        # Only for a Gemma 3 does Transformers 5 apply `rope_scaling` to the layers with full
        # attention alone; for another model it would scale the RoPE of every layer.
        if model_type == "gemma3_text":
            fields |= _rope_scaling_field(rope["full_attention"], ("rope_theta",))
        return fields
    neox = model_type == "gpt_neox"
    names = {
        "rope_theta": "rotary_emb_base" if neox else "rope_theta",
        "partial_rotary_factor": "rotary_pct" if neox else "partial_rotary_factor",
    }
    fields = {older_name: rope[name] for name, older_name in names.items() if name in rope}
    return fields | _rope_scaling_field(rope, names)


def _rope_scaling_field(rope: dict[str, Any], omitted: Collection[str]) -> dict[str, Any]:
    """Return Transformers 4's field `rope_scaling`, without the entries in `omitted`; no field for
    unscaled RoPE.
    """
    if rope.get("rope_type", "default") == "default":
        return {}
    return {"rope_scaling": {name: rope[name] for name in rope if name not in omitted}}


def write_tensors(tensors: dict[str, Tensor], folder: Path, shard: str = SHARD) -> None:
    """Write tensors as one safetensors file, or as several of at most `shard` bytes ("2GB") with
    their index.
    """
    pattern = SINGLE_FILE.replace(".safetensors", "{suffix}.safetensors")
    # Shapes and types suffice to plan the files.
    meta_tensors = {
        name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        for name, tensor in tensors.items()
    }
    split = split_torch_state_dict_into_shards(
        meta_tensors, filename_pattern=pattern, max_shard_size=shard
    )
    for file, names in split.filename_to_tensors.items():
        shard_tensors = {name: tensors[name] for name in names}
        save_tensors(shard_tensors, folder / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def write_texts(tokenizer: Tokenizer, folder: Path, config: PreTrainedConfig, rows: int) -> None:
    """Write the tokenizer's files and generation_config.json, and set the ids of special tokens in
    `config`. A pad token for which the embedding, of `rows` rows, has no row is left out.
    """
    ids = write_tokenizer(tokenizer, folder, config.max_position_embeddings, rows)
    for name, token in ids.items():
        setattr(config, name, token)
    write_generation(folder, ids)


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int, rows: int) -> Ids:
    """Write a tokenizer's files, with `max_length` as its `model_max_length`; return the ids of its
    BOS, EOS and pad tokens by the names of their fields in configurations.

    If a generation_config.json came with the tokenizer, its ids, which may be several for EOS, take
    priority over the tokenizer's own. A pad id of `rows` or more, for which the embedding has no
    row, is left out with a warning, also from that file.
    """
    tokenizer.save(folder)
    table = json.loads((folder / CONFIG).read_text("utf-8")) | {"model_max_length": max_length}
    text = json.dumps(table, indent=2, ensure_ascii=False) + "\n"
    (folder / CONFIG).write_text(text, "utf-8")
    generation = json.loads(tokenizer.companion_files.get(GENERATION, "{}"))
    bos_ids, eos_ids, pad_ids = (token_ids(generation, name) for name in _ID_FIELDS)
    pad = pad_token_with_row(pad_ids[0] if pad_ids else tokenizer.pad, rows)
    eos = eos_ids[0] if eos_ids else tokenizer.end
    ids: Ids = {
        "bos_token_id": bos_ids[0] if bos_ids else tokenizer.bos,
        "eos_token_id": eos_ids if len(eos_ids) > 1 else eos,
        PAD: pad,
    }
    # `save` has written the settings with the pad token that has no row in the embedding.
    if pad is None and generation.pop(PAD, None) is not None:
        (folder / GENERATION).write_text(json.dumps(generation, indent=2) + "\n", "utf-8")
    return {name: token for name, token in ids.items() if token is not None}


def readable_tokenizer(tokenizer: Tokenizer, config: PreTrainedConfig) -> Tokenizer | None:
    """Return the tokenizer, its class changed if needed, so that Transformers reads the same one
    from a folder with this configuration; None where Transformers would read another.

    Some classes of Transformers build their family's usual tokenizer from the vocabulary alone, and
    some architectures (Qwen2) use such a class whatever the folder names.
    """
    expected = _token_settings(tokenizer.inner)
    for candidate in (tokenizer, tokenizer.with_class("PreTrainedTokenizerFast")):
        with tempfile.TemporaryDirectory() as folder:
            candidate.save(folder)
            config.save_pretrained(folder)
            try:
                hf_tokenizer = AutoTokenizer.from_pretrained(
                    folder, local_files_only=True, trust_remote_code=False
                )
                text_ids = hf_tokenizer.encode("a", add_special_tokens=False)
                ids_around = special_ids_around(hf_tokenizer.encode("a"), text_ids)
            except Exception:  # Transformers raises nothing narrower
                continue
        settings = _token_settings(hf_tokenizer.backend_tokenizer)
        # Special tokens before and after a text.
        same_around = ids_around == (tokenizer.opening, tokenizer.closing)
        # Not ==, since Transformers may have added special tokens.
        if same_around and expected.items() <= settings.items():
            return candidate
    return None


def _token_settings(inner: tokenizers.Tokenizer) -> dict[Any, Any]:
    """Return all settings that decide which tokens a text has: normalizer, pre-tokenizer, model and
    decoder by name, and for each added token, by (id, text), the options of its matching.
    """
    table = json.loads(inner.to_str())
    settings: dict[Any, Any] = {name: table[name] for name in _TOKENIZER_PARTS}
    for token in table["added_tokens"]:
        settings[token["id"], token["content"]] = [token[name] for name in _MATCH_OPTIONS]
    return settings


def write_generation(folder: Path, ids: Ids) -> None:
    """Write generation_config.json with the ids of special tokens.

    Where the folder has one already, written with the tokenizer, only missing ids are added: its
    settings stay, even those that Transformers warns of, such as a temperature without sampling.

    Raises:
        WakefulError: the file is damaged.
    """
    if read_generation(folder, GENERATION) is None:
        GenerationConfig(**ids).save_pretrained(folder)
        return
    file = folder / GENERATION
    table = json.loads(file.read_text("utf-8"))
    missing = {
        name: token for name, token in ids.items() if token is not None and table.get(name) is None
    }
    file.write_text(json.dumps(table | missing, indent=2, sort_keys=True) + "\n", "utf-8")


def read_generation(folder: Path, name: str = "") -> GenerationConfig | None:
    """Read a folder's generation_config.json; return None where there is none.

    `name` is the file's name in error messages, by default its path.

    Raises:
        WakefulError: the file is damaged.
    """
    if not (folder / GENERATION).is_file():
        return None
    with wrap_errors(f"{name or folder / GENERATION} is damaged"):
        return GenerationConfig.from_pretrained(folder, local_files_only=True)


def refuse_existing(folder: Path) -> None:
    """Raise `WakefulError` if there is anything at this path."""
    with disk_errors(folder):
        if folder.exists() or folder.is_symlink():
            raise WakefulError(f"{folder} exists already; choose another folder")


@contextmanager
def create_folder(folder: Path, card: str) -> Iterator[Path]:
    """Yield a temporary folder beside `folder` to write to, with `card` as its README.md unless
    that is empty. When the context ends, it is renamed to `folder`, or removed after an error.

    Raises:
        WakefulError: there is something at `folder` already, or it cannot be written.
    """
    refuse_existing(folder)
    temporary_folder = temporary_path_beside(folder)
    try:
        with disk_errors(folder):
            temporary_folder.mkdir(parents=True)
            if card:
                (temporary_folder / "README.md").write_text(card, "utf-8")
            yield temporary_folder
            refuse_existing(folder)  # another process may have been faster
            temporary_folder.rename(folder)
    finally:
        shutil.rmtree(temporary_folder, ignore_errors=True)
