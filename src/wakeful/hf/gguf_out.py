"""Weights out as one GGUF file, which llama.cpp and what is built on it run.

Stock architectures only: a file says which one it is and holds no code. Names of tensors are the
package gguf's; queries and keys of a Llama are reordered as llama.cpp wants them, whose rotary
embedding pairs neighboring channels.
"""

import dataclasses
import io
import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import redirect_stderr
from functools import partial
from pathlib import Path
from typing import Literal, get_args

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import Tensor, nn

from wakeful.config.model import ModelConfig
from wakeful.data.tokenizer import Tokenizer
from wakeful.device import free_memory
from wakeful.errors import WakefulError
from wakeful.hf.checkpoint_reader import is_read_by_transformers, load_hf_model
from wakeful.hf.families import FAMILIES
from wakeful.hf.gguf_architectures import (
    convert_for_llama_cpp,
    gguf_architecture,
    gguf_metadata,
    llama_cpp_architecture,
    make_gguf_namer,
    rope_factors,
)
from wakeful.hf.gguf_in import MODEL, TOKENIZER, dump_tokenizer_files
from wakeful.hf.gguf_tokens import gguf_tokenizer_fields
from wakeful.hf.read_back import RoundedParameters, read_back
from wakeful.hf.weights_in import read_gguf_decoder
from wakeful.hf.weights_out import hf_tensors, refuse_existing
from wakeful.model.decoder import Decoder
from wakeful.model.fold import folded
from wakeful.runs.run import disk_errors, replace_atomically
from wakeful.version import __version__

Steps = Mapping[str, tuple[int, Tensor]]
"""Bits and steps (rows, blocks) of matrices on llama.cpp's grids, by the decoder's names."""
Storage = Literal["f32", "f16", "q8_0", "q4_0"]
"""Type that matrices are stored in; scalars and vectors are always float32."""
_TYPES = {
    "f32": (GGMLQuantizationType.F32, gguf.LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, gguf.LlamaFileType.MOSTLY_F16),
    "q8_0": (GGMLQuantizationType.Q8_0, gguf.LlamaFileType.MOSTLY_Q8_0),
    "q4_0": (GGMLQuantizationType.Q4_0, gguf.LlamaFileType.MOSTLY_Q4_0),
}
_LARGEST = float(np.finfo(np.float16).max)
_BLOCK = 32
"""Numbers that share a scale in Q8_0 and Q4_0."""


def export_gguf(
    decoder: Decoder,
    path: str | Path,
    *,
    tokenizer: Tokenizer,
    storage: Storage = "f16",
    name: str = "",
    lineage: str = "",
    origin: str = "",
    steps: Steps | None = None,
) -> str:
    """Write a decoder that is a stock architecture to a GGUF file; return the architecture.

    In "q8_0" and "q4_0" matrices have a scale every 32 inputs, as the package gguf rounds them; one
    whose rows are not whole blocks stays float16, and "q4_0" keeps embedding and head in Q8_0.
    Matrices that lie on a grid of llama.cpp, with their `steps`, are stored as they are there.
    `lineage` says where the weights come from, and `origin` names that model, with a slash as the
    hub does. It is read back before it has its name.

    Raises:
        WakefulError: the file exists, cannot be written or not be read back; the decoder is of no
            architecture that GGUF files here can hold; or its tokenizer cuts text in a way that
            llama.cpp has no name for.
    """
    if storage not in get_args(Storage):
        raise WakefulError(f"gguf must be one of {', '.join(get_args(Storage))}, got {storage!r}")
    path = Path(path)
    refuse_existing(path)
    decoder = folded(decoder)
    kind, config = gguf_architecture(decoder.config)
    vocabulary = gguf_tokenizer_fields(tokenizer, config.vocab_size, name or path.stem)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors(path), replace_atomically(path) as part:
        writer = GGUFWriter(part, llama_cpp_architecture(kind))
        # Transformers takes "mistral", and no other name, for an architecture of its own.
        title = name or path.stem
        writer.add_name(title.title() if title == "mistral" else title)
        writer.add_description(f"{lineage} Written by wakeful {__version__}.".lstrip())
        writer.add_tags(["wakeful", "text-generation"])
        if origin:
            organization, _, base = origin.rpartition("/")
            writer.add_base_model_count(1)
            writer.add_base_model_name(0, base)
            if organization:
                writer.add_base_model_organization(0, organization)
                writer.add_base_model_repo_url(0, f"https://huggingface.co/{origin}")
        grids = _grids(decoder, kind, config, steps or {})
        types = Counter(stored.name for stored, _ in grids.values())
        file_type = _TYPES[storage][1]
        for name_of_type, _ in types.most_common(1):
            file_type = gguf.LlamaFileType[f"MOSTLY_{name_of_type}"]
        writer.add_file_type(file_type)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add = {
            int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
            list: writer.add_array, bool: writer.add_bool,
        }  # fmt: skip
        for key, value in (gguf_metadata(kind, config) | vocabulary).items():
            add[type(value)](key, value)
        named = tokenizer.chat_templates.items()
        writer.add_chat_template([{"name": name, "template": text} for name, text in named])
        writer.add_string(MODEL, json.dumps(dataclasses.asdict(config)))
        writer.add_string(TOKENIZER, dump_tokenizer_files(tokenizer))
        for name_in_file, array in _arrays(decoder, kind, config):
            if name_in_file in grids:
                stored, step = grids[name_in_file]
                writer.add_tensor(
                    name_in_file, packed_blocks(array, step, stored), raw_dtype=stored
                )
                continue
            stored = _storage(
                array, storage, of_tokens=name_in_file.startswith(("token_embd", "output."))
            )
            if stored != GGMLQuantizationType.F32 and not np.abs(array).max() <= _LARGEST:
                raise WakefulError(
                    f"{name_in_file} has a value past {_LARGEST:,}, the largest in half precision: "
                    "choose gguf f32"
                )
            packed = gguf.quants.quantize(array, stored)
            writer.add_tensor(name_in_file, packed, raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        read_back(
            part, decoder, load=partial(_load_if_it_fits, decoder),
            rounding=RoundedParameters(partial(_round_trip, storage)),
        )  # fmt: skip
    return kind


def check_gguf(decoder: Decoder, tokenizer: Tokenizer) -> None:
    """Raise `WakefulError` where `export_gguf` would refuse a decoder or its tokenizer."""
    _, config = gguf_architecture(folded(decoder).config)
    gguf_tokenizer_fields(tokenizer, config.vocab_size, "")


def gguf_bytes(decoder: Decoder) -> int:
    """Return the bytes of a decoder's weights in a file with matrices in float16."""
    return sum(tensor.numel() * (4 if tensor.ndim == 1 else 2) for tensor in decoder.parameters())


def llama_quantize_flags(decoder: Decoder, types: Mapping[str, str]) -> str:
    """Return the flags by which llama-quantize gives each matrix its type, one a line; `types` are
    by the decoder's names of matrices.
    """
    kind, config = gguf_architecture(decoder.config)
    flags = {"token_embd.weight": "--token-embedding-type", "output.weight": "--output-tensor-type"}
    lines: list[str] = []
    family, name_of = FAMILIES[kind], make_gguf_namer(kind, config.num_layers)
    for link in family.links(decoder.config):
        name = name_of(family.stored(link.hf_name))
        stored = {types[own].lower() for own in link.own_names if own in types}
        flag = f"{flags[name]} " if name in flags else f"--tensor-type {name}="
        lines.extend(flag + each for each in stored)
    return "\n".join(lines) + "\n"


def _grids(
    decoder: Decoder, kind: str, config: ModelConfig, steps: Steps
) -> dict[str, tuple[GGMLQuantizationType, np.ndarray]]:
    """Return the type of each matrix on a grid and its steps, by its name in a file."""
    family, grids = FAMILIES[kind], dict[str, tuple[GGMLQuantizationType, np.ndarray]]()
    for link in family.links(decoder.config):
        parts = [steps[name] for name in link.own_names if name in steps]
        if not parts:
            continue
        hf_name, bits = family.stored(link.hf_name), {bits for bits, _ in parts}
        if len(bits) > 1 or len(parts) < len(link.own_names):
            raise WakefulError(f"{hf_name} of a {kind} would hold matrices of several types")
        joined = link.join([step.float() for _, step in parts]).cpu().numpy()
        name = make_gguf_namer(kind, config.num_layers)(hf_name)
        steps_array = convert_for_llama_cpp(joined, hf_name, kind, config)
        grids[name] = (GGMLQuantizationType[f"Q{bits.pop()}_0"], steps_array)
        if kind == "olmo2" and config.tied and name == "token_embd.weight":
            grids["output.weight"] = grids[name]
    return grids


def packed_blocks(array: np.ndarray, steps: np.ndarray, stored: GGMLQuantizationType) -> np.ndarray:
    """Return the blocks of a matrix (N, K) on a grid with these steps (N, K / 32): each a step in
    float16 and 32 numbers, of 4 bits the first sixteen in the low halves of bytes and the others in
    the high ones, of 5 bits their top bits before them.
    """
    rows = len(array)
    d = steps.astype("<f2")[..., None]
    blocks = array.reshape(rows, -1, _BLOCK)
    scale = d.astype(np.float32)
    q = np.rint(np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale != 0)).astype(int)
    parts: list[np.ndarray] = [d.view(np.uint8)]
    if stored == GGMLQuantizationType.Q8_0:
        parts.append(q.astype(np.int8).view(np.uint8))
    else:
        codes = (q + (16 if stored == GGMLQuantizationType.Q5_0 else 8)).astype(np.uint8)
        if stored == GGMLQuantizationType.Q5_0:
            parts.append(np.packbits(codes >> 4, axis=-1, bitorder="little"))
        low = codes & 15
        parts.append(low[..., : _BLOCK // 2] | low[..., _BLOCK // 2 :] << 4)
    return np.concatenate(parts, axis=-1).reshape(rows, -1)


def _load_if_it_fits(decoder: Decoder, path: Path) -> nn.Module | None:
    """Load a GGUF file with Transformers, or with our reader where that of Transformers is
    incomplete; None where the unpacked weights do not fit into memory.
    """
    size = sum(parameter.numel() for parameter in decoder.parameters())
    if 2 * 4 * size > free_memory(torch.device("cpu")):  # two copies in float32
        return None
    if is_read_by_transformers(path):
        with redirect_stderr(io.StringIO()):  # a bar, which no setting of its own switches off
            return load_hf_model(path.parent, dtype=torch.float32, gguf=path.name, strict=True)
    return read_gguf_decoder(path, max_length=0, dtype=None, device=torch.device("cpu"))


def _round_trip(storage: Storage, weight: Tensor) -> Tensor:
    """Return a weight as a file holds it."""
    array = weight.float().cpu().numpy()
    stored = _storage(array, storage, of_tokens=False)
    packed = gguf.quants.quantize(array, stored)
    return torch.from_numpy(gguf.quants.dequantize(packed, stored)).to(weight)


def _arrays(decoder: Decoder, kind: str, config: ModelConfig) -> Iterator[tuple[str, np.ndarray]]:
    """Yield every tensor as llama.cpp wants it, and its name there."""
    name_of = make_gguf_namer(kind, config.num_layers)
    for hf_name, tensor in hf_tensors(decoder, kind, torch.float32).items():
        gguf_name = name_of(hf_name)
        array = convert_for_llama_cpp(tensor.numpy(), hf_name, kind, config)
        yield gguf_name, array
        if kind == "olmo2" and config.tied and gguf_name == "token_embd.weight":
            yield "output.weight", array  # which llama.cpp asks for
    factors = rope_factors(config)
    if factors is not None:
        yield "rope_freqs.weight", factors.numpy()


def _storage(array: np.ndarray, storage: Storage, *, of_tokens: bool) -> GGMLQuantizationType:
    if array.ndim == 1:
        return GGMLQuantizationType.F32
    if storage in ("q8_0", "q4_0"):
        if array.shape[-1] % _BLOCK:
            return GGMLQuantizationType.F16
        return _TYPES["q8_0" if of_tokens else storage][0]
    return _TYPES[storage][0]
