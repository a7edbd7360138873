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
    INDEX,
    ONE,
    PAD,
    check_pad_token,
    corrected_config,
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
_IDS = ("bos_token_id", "eos_token_id", PAD)
_PARTS = ("normalizer", "pre_tokenizer", "model", "decoder")
Ids = dict[str, int | list[int] | None]
_MATCHED = ("single_word", "lstrip", "rstrip", "normalized")


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

    It is a stock architecture where the decoder is exactly one once it is folded, and Transformers
    reads the tokenizer beside it, else our own class with its code, for `trust_remote_code=True`.
    Weights are rounded to `dtype`; with `types` none is rounded: see `as_in_files`. A
    file of weights holds at most `shard`. `card` becomes README.md. It is read
    back before it has its name (`read_back`).

    Raises:
        WakefulError: the folder exists, or it cannot be written, or not be read back.
    """
    kind, config, tokenizer = architecture_to_write(decoder.config, tokenizer)
    tensors = hf_tensors(decoder, kind, dtype, types)
    config.dtype = dtype
    with create_folder(Path(folder), card) as part:
        write_texts(tokenizer, part, config, decoder.config.vocab_size)
        if kind == WakefulConfig.model_type:
            config.auto_map = AUTO_MAP  # pyright: ignore[reportAttributeAccessIssue]
            write_code(decoder, part)
        write_config(config, part)
        write_tensors(tensors, part, shard)
        read_back(part, decoder, tokenizer=tokenizer)
    return kind


def save_stock(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    tokenizer: Tokenizer,
    dtype: torch.dtype | None,
    types: Mapping[str, torch.dtype] | None = None,
    card: str = "",
) -> str:
    """Write a Transformers model as its own architecture, whole or not at all; return its type.

    Weights are rounded to `dtype`, or its own; with `types` none is rounded: see `as_in_files`.
    It is read back before it has its name.

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
    with create_folder(Path(folder), card) as part:
        with suppress_warnings():
            model.save_pretrained(part, state_dict=tensors, max_shard_size=SHARD)
        ids = write_tokenizer(
            written_tokenizer, part, config.max_position_embeddings, embedding_rows(model)
        )
        write_generation(part, ids)
        write_config(config, part)
        read_back(part, model, tokenizer=written_tokenizer)
    return config.model_type


def architecture_to_write(
    config: ModelConfig, tokenizer: Tokenizer
) -> tuple[str, PreTrainedConfig, Tokenizer]:
    """Return the result of `stock_architecture`, or our own architecture where Transformers would
    read another tokenizer beside the stock one; and the tokenizer as it is read there.

    Raises:
        WakefulError: Transformers reads it in neither.
    """
    for kind, hf_config in (stock_architecture(config), _own(config)):
        written_tokenizer = readable_tokenizer(tokenizer, hf_config)
        if written_tokenizer is not None:
            return kind, hf_config, written_tokenizer
    raise WakefulError(
        "the tokenizer cannot be written: Transformers reads another one of its files; give the "
        "model one that Transformers loads"
    )


def stock_architecture(config: ModelConfig) -> tuple[str, PreTrainedConfig]:
    """Return the stock architecture that the decoder is once folded, or our own, and its name."""
    plain = folded_config(config)
    for family in STOCK:
        hf_config = family.to_hf_config(plain)
        try:
            same = canonical_config(family.from_hf_config(hf_config, 0)) == canonical_config(plain)
        except WakefulError:  # the nearest of theirs is none that we can be
            continue
        if same:
            name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[hf_config.model_type]
            hf_config.architectures = [name if isinstance(name, str) else name[0]]
            return hf_config.model_type, hf_config
    return _own(config)


def _own(config: ModelConfig) -> tuple[str, PreTrainedConfig]:
    return WakefulConfig.model_type, WakefulConfig.of(config, architectures=["WakefulForCausalLM"])


def hf_tensors(
    decoder: Decoder,
    kind: str,
    dtype: torch.dtype,
    types: Mapping[str, torch.dtype] | None = None,
) -> dict[str, Tensor]:
    """Return a decoder's weights as checkpoints of the architecture `kind` name them, in the types
    of `as_in_files`.
    """
    family = FAMILIES[kind]
    if kind != WakefulConfig.model_type:
        decoder = folded(decoder)
    own_tensors = dict[str, Tensor](decoder.named_parameters(remove_duplicate=False))
    own_tensors |= decoder.named_buffers(remove_duplicate=False)  # softmax-1's constant
    tensors: dict[str, Tensor] = {}
    for link in family.links(decoder.config):
        name = family.stored(link.hf_name)
        joined = link.join([own_tensors[part].detach() for part in link.own_names])
        tensors[name] = to_file_type(joined, name, dtype, types).contiguous()
        if not is_finite(tensors[name]):
            raise WakefulError(
                f"{name} has a value that is not finite in {str(dtype).removeprefix('torch.')}: "
                "choose dtype float32"
            )
    return tensors


def write_config(config: PreTrainedConfig, folder: Path) -> None:
    """Write config.json, with rotary positions in the fields of older readers too.

    Transformers 5 says them in `rope_parameters`. Who knows `rope_theta` alone (mlx-lm 0.32,
    Transformers 4) would take a base of 10,000 without a word. `output_attentions` is left out:
    Transformers writes no configuration that has it beside SDPA.
    """
    vars(config)["_output_attentions"] = False
    config.save_pretrained(folder)
    file = folder / "config.json"
    table = json.loads(file.read_text("utf-8"))
    text = table.get("text_config")  # of a model that reads more than text
    rope_parts = [
        part for part in (table, text) if isinstance(part, dict) and part.get("rope_parameters")
    ]
    for part in rope_parts:
        part.update(_older(part["rope_parameters"], part["model_type"]))
    if rope_parts:
        file.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n", "utf-8")


def _older(rope: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return rotary positions in the fields that preceded `rope_parameters`."""
    kinds = {"full_attention": "rope_theta", "sliding_attention": "rope_local_base_freq"}
    if rope.keys() & kinds:  # a table for each kind of layer
        fields = {
            name: rope[layer_kind]["rope_theta"]
            for layer_kind, name in kinds.items()
            if layer_kind in rope
        }
        if kind != "gemma3_text":  # of others Transformers 5 would take it for all there is
            return fields
        return fields | _scaling(rope["full_attention"], ("rope_theta",))
    neox = kind == "gpt_neox"
    names = {
        "rope_theta": "rotary_emb_base" if neox else "rope_theta",
        "partial_rotary_factor": "rotary_pct" if neox else "partial_rotary_factor",
    }
    fields = {older_name: rope[name] for name, older_name in names.items() if name in rope}
    return fields | _scaling(rope, names)


def _scaling(rope: dict[str, Any], omitted: Collection[str]) -> dict[str, Any]:
    """Return the scaling of positions, if any, without the fields in `omitted`."""
    if rope.get("rope_type", "default") == "default":
        return {}
    return {"rope_scaling": {name: rope[name] for name in rope if name not in omitted}}


def write_tensors(tensors: dict[str, Tensor], folder: Path, shard: str = SHARD) -> None:
    """Write tensors as one file, or as several of at most `shard` with their index."""
    pattern = ONE.replace(".safetensors", "{suffix}.safetensors")
    split = split_torch_state_dict_into_shards(
        {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            for name, tensor in tensors.items()
        },
        filename_pattern=pattern,
        max_shard_size=shard,
    )
    for file, names in split.filename_to_tensors.items():
        chosen = {name: tensors[name] for name in names}
        save_tensors(chosen, folder / file, {"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", "utf-8")


def write_texts(tokenizer: Tokenizer, folder: Path, config: PreTrainedConfig, rows: int) -> None:
    """Write the tokenizer's files and how to generate; name the special tokens in `config`, a pad
    token only if it is among the `rows` of the embedding.
    """
    ids = write_tokenizer(tokenizer, folder, config.max_position_embeddings, rows)
    for name, token in ids.items():
        setattr(config, name, token)
    write_generation(folder, ids)


def write_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int, rows: int) -> Ids:
    """Write the tokenizer's files; return the ids of special tokens that a configuration names:
    all ends, where it says how to generate, and a pad token that is among `rows`.
    """
    tokenizer.save(folder)
    table = json.loads((folder / CONFIG).read_text("utf-8")) | {"model_max_length": max_length}
    text = json.dumps(table, indent=2, ensure_ascii=False) + "\n"
    (folder / CONFIG).write_text(text, "utf-8")
    generation = json.loads(tokenizer.companion_files.get(GENERATION, "{}"))
    begins, ends, pads = (token_ids(generation, name) for name in _IDS)
    pad = check_pad_token(pads[0] if pads else tokenizer.pad, rows)
    ids: Ids = {
        "bos_token_id": begins[0] if begins else tokenizer.bos,
        "eos_token_id": ends if len(ends) > 1 else ends[0] if ends else tokenizer.end,
        PAD: pad,
    }
    if pad is None and generation.pop(PAD, None) is not None:
        (folder / GENERATION).write_text(json.dumps(generation, indent=2) + "\n", "utf-8")
    return {name: token for name, token in ids.items() if token is not None}


def readable_tokenizer(tokenizer: Tokenizer, config: PreTrainedConfig) -> Tokenizer | None:
    """Return the tokenizer as Transformers reads it in a folder of such a model; None where it
    reads another one there.

    Some of its classes make a tokenizer of the vocabulary alone, as their own family's is, and some
    architectures (Qwen2's) have such a class whatever a folder names.
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
                plain = hf_tokenizer.encode("a", add_special_tokens=False)
                put = special_ids_around(hf_tokenizer.encode("a"), plain)
            except Exception:  # Transformers raises nothing narrower
                continue
        described = _token_settings(hf_tokenizer.backend_tokenizer)
        if put == (tokenizer.opening, tokenizer.closing) and expected.items() <= described.items():
            return candidate
    return None


def _token_settings(inner: tokenizers.Tokenizer) -> dict[Any, Any]:
    """Return the tokenizer's settings that determine tokens, by part and by added token."""
    table = json.loads(inner.to_str())
    parts: dict[Any, Any] = {name: table[name] for name in _PARTS}
    for token in table["added_tokens"]:
        parts[token["id"], token["content"]] = [token[name] for name in _MATCHED]
    return parts


def write_generation(folder: Path, ids: Ids) -> None:
    """Write how to generate: as the file that went along with the tokenizer says, if one did.

    What it says stays, also what Transformers would only warn of, such as a temperature without
    sampling.

    Raises:
        WakefulError: it is damaged.
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
    """Return what a folder's generation_config.json says; None where there is none.

    `name` is what to call the file in messages; "" is where it is.

    Raises:
        WakefulError: it is damaged.
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
    """Give a folder beside `folder` to fill, with `card` as its README.md where there is one; it
    takes its place when that is done.
    """
    refuse_existing(folder)
    part = temporary_path_beside(folder)
    try:
        with disk_errors(folder):
            part.mkdir(parents=True)
            if card:
                (part / "README.md").write_text(card, "utf-8")
            yield part
            refuse_existing(folder)  # another process may have been faster
            part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
