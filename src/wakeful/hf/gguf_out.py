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
_LARGEST_FLOAT16 = float(np.finfo(np.float16).max)
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

    `storage` is the type of matrices. In "q8_0" and "q4_0" they have a scale every 32 inputs, as
    the package gguf rounds them; a matrix whose rows are not whole blocks stays float16, and "q4_0"
    keeps embedding and head in Q8_0. Matrices that are quantized for llama.cpp already, with
    `steps`, are stored without further rounding. `name` is the model's name, by default the file's.
    `lineage` says where the weights come from, and `origin` names that model, with a slash as the
    hub does. The file is read back before it gets its name.

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
    model_type, config = gguf_architecture(decoder.config)
    vocabulary = gguf_tokenizer_fields(tokenizer, config.vocab_size, name or path.stem)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with disk_errors(path), replace_atomically(path) as part:
        writer = GGUFWriter(part, llama_cpp_architecture(model_type))
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
        grids = _find_grids(decoder, model_type, config, steps or {})
        type_counts = Counter(stored.name for stored, _ in grids.values())
        file_type = _TYPES[storage][1]
        for most_common_type, _ in type_counts.most_common(1):  # none without grids
            file_type = gguf.LlamaFileType[f"MOSTLY_{most_common_type}"]
        writer.add_file_type(file_type)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        add = {
            int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
            list: writer.add_array, bool: writer.add_bool,
        }  # fmt: skip
        for key, value in (gguf_metadata(model_type, config) | vocabulary).items():
            add[type(value)](key, value)
        templates = tokenizer.chat_templates.items()
        writer.add_chat_template([{"name": name, "template": text} for name, text in templates])
        writer.add_string(MODEL, json.dumps(dataclasses.asdict(config)))
        writer.add_string(TOKENIZER, dump_tokenizer_files(tokenizer))
        for name_in_file, array in _iterate_arrays(decoder, model_type, config):
            if name_in_file in grids:
                stored, step = grids[name_in_file]
                writer.add_tensor(
                    name_in_file, packed_blocks(array, step, stored), raw_dtype=stored
                )
                continue
            stored = _choose_type(
                array, storage, is_vocabulary=name_in_file.startswith(("token_embd", "output."))
            )
            if stored != GGMLQuantizationType.F32 and not np.abs(array).max() <= _LARGEST_FLOAT16:
                raise WakefulError(
                    f"{name_in_file} has a value past {_LARGEST_FLOAT16:,}, the largest in half "
                    "precision: choose gguf f32"
                )
            packed = gguf.quants.quantize(array, stored)
            writer.add_tensor(name_in_file, packed, raw_dtype=stored)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        read_back(
            part, decoder, load=partial(_load_if_it_fits, decoder),
            rounding=RoundedParameters(partial(_round_to_storage, storage)),
        )  # fmt: skip
    return model_type


def check_gguf(decoder: Decoder, tokenizer: Tokenizer) -> None:
    """Raise `WakefulError` if no GGUF file can hold a decoder's architecture or its tokenizer; the
    weights' values are not checked.
    """
    _, config = gguf_architecture(folded(decoder).config)
    gguf_tokenizer_fields(tokenizer, config.vocab_size, "")


def gguf_bytes(decoder: Decoder) -> int:
    """Return the bytes of a decoder's weights in a GGUF file that stores matrices in float16 and
    vectors in float32.
    """
    return sum(tensor.numel() * (4 if tensor.ndim == 1 else 2) for tensor in decoder.parameters())


def llama_quantize_flags(decoder: Decoder, types: Mapping[str, str]) -> str:
    """Return flags for llama.cpp's llama-quantize that give each matrix its quantized type, one
    flag per line.

    `types` maps the decoder's names of matrices to types such as "Q4_K". Matrices that a GGUF file
    fuses into one have the same type.
    """
    model_type, config = gguf_architecture(decoder.config)
    # The embedding and the head have flags of their own.
    flags = {"token_embd.weight": "--token-embedding-type", "output.weight": "--output-tensor-type"}
    lines: list[str] = []
    family, name_of = FAMILIES[model_type], make_gguf_namer(model_type, config.num_layers)
    for link in family.links(decoder.config):
        name = name_of(family.checkpoint_name(link.hf_name))
        flag = f"{flags[name]} " if name in flags else f"--tensor-type {name}="
        # One type, or none for a matrix without a type.
        link_types = {types[part].lower() for part in link.decoder_names if part in types}
        lines.extend(flag + link_type for link_type in link_types)
    return "\n".join(lines) + "\n"


def _find_grids(
    decoder: Decoder, model_type: str, config: ModelConfig, steps: Steps
) -> dict[str, tuple[GGMLQuantizationType, np.ndarray]]:
    """Return, by names in a GGUF file, the GGML type and the steps (rows, blocks) of each matrix
    that is already quantized for llama.cpp: its values are integers times the step of their block.

    `steps` has the bits and the steps of these matrices by the decoder's names. A fused matrix of
    the file has the joined steps of the decoder's matrices in it.

    Raises:
        WakefulError: a fused matrix would have parts of several types.
    """
    family, grids = FAMILIES[model_type], dict[str, tuple[GGMLQuantizationType, np.ndarray]]()
    for link in family.links(decoder.config):
        parts = [steps[name] for name in link.decoder_names if name in steps]
        if not parts:  # not quantized for llama.cpp
            continue
        hf_name = family.checkpoint_name(link.hf_name)
        bits, *other_bits = {matrix_bits for matrix_bits, _ in parts}
        if other_bits or len(parts) < len(link.decoder_names):
            raise WakefulError(f"{hf_name} of a {model_type} would hold matrices of several types")
        joined = link.join([step.float() for _, step in parts]).cpu().numpy()
        name = make_gguf_namer(model_type, config.num_layers)(hf_name)
        # The steps are reordered and scaled as the matrix is.
        steps_array = convert_for_llama_cpp(joined, hf_name, model_type, config)
        grids[name] = (GGMLQuantizationType[f"Q{bits}_0"], steps_array)
        # llama.cpp requires a head of an OLMo 2, even a tied one.
        if model_type == "olmo2" and config.tied and name == "token_embd.weight":
            grids["output.weight"] = grids[name]
    return grids


def packed_blocks(array: np.ndarray, steps: np.ndarray, stored: GGMLQuantizationType) -> np.ndarray:
    """Pack a matrix (N, K), whose values are integer codes times `steps` (N, K / 32), into the
    bytes (N, bytes of a row) of llama.cpp's block format `stored`: Q8_0, Q5_0 or Q4_0.

    A block is a step in float16, then 32 codes. Codes of 8 bits are int8. To codes of 4 bits 8 is
    added; the first sixteen take the low halves of 16 bytes, the others the high halves. To codes
    of 5 bits 16 is added; 4 bytes hold their top bits, and the low 4 bits follow as in Q4_0.
    """
    rows = len(array)
    float16_steps = steps.astype("<f2")[..., None]
    blocks = array.reshape(rows, -1, _BLOCK)
    scale = float16_steps.astype(np.float32)
    # A block of zeros may have the step 0, and has the codes 0.
    quotients = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale != 0)
    integers = np.rint(quotients).astype(int)
    parts: list[np.ndarray] = [float16_steps.view(np.uint8)]
    if stored == GGMLQuantizationType.Q8_0:
        parts.append(integers.astype(np.int8).view(np.uint8))
    else:
        offset = 16 if stored == GGMLQuantizationType.Q5_0 else 8
        codes = (integers + offset).astype(np.uint8)
        if stored == GGMLQuantizationType.Q5_0:
            parts.append(np.packbits(codes >> 4, axis=-1, bitorder="little"))
        low = codes & 15
        parts.append(low[..., : _BLOCK // 2] | low[..., _BLOCK // 2 :] << 4)
    return np.concatenate(parts, axis=-1).reshape(rows, -1)


def _load_if_it_fits(decoder: Decoder, path: Path) -> nn.Module | None:
    """Load the GGUF file that was written for `decoder`: with Transformers, or with our own reader
    if Transformers' would change the model. Return None if the unpacked weights do not fit memory.
    """
    num_weights = sum(parameter.numel() for parameter in decoder.parameters())
    if 2 * 4 * num_weights > free_memory(torch.device("cpu")):  # two copies in float32
        return None
    if is_read_by_transformers(path):
        with redirect_stderr(io.StringIO()):  # a progress bar that no setting switches off
            return load_hf_model(path.parent, dtype=torch.float32, gguf=path.name, strict=True)
    return read_gguf_decoder(path, max_length=0, dtype=None, device=torch.device("cpu"))


def _round_to_storage(storage: Storage, weight: Tensor) -> Tensor:
    """Return a weight rounded as a GGUF file of this storage rounds it. An embedding and a head,
    which a "q4_0" file keeps in Q8_0, are rounded like other matrices.
    """
    array = weight.float().cpu().numpy()
    ggml_type = _choose_type(array, storage, is_vocabulary=False)
    packed = gguf.quants.quantize(array, ggml_type)
    return torch.from_numpy(gguf.quants.dequantize(packed, ggml_type)).to(weight)


def _iterate_arrays(
    decoder: Decoder, model_type: str, config: ModelConfig
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the GGUF name of every tensor of a decoder, and its values in llama.cpp's layout in
    float32. Tensors that llama.cpp needs besides are among them.
    """
    name_of = make_gguf_namer(model_type, config.num_layers)
    for hf_name, tensor in hf_tensors(decoder, model_type, torch.float32).items():
        gguf_name = name_of(hf_name)
        array = convert_for_llama_cpp(tensor.numpy(), hf_name, model_type, config)
        yield gguf_name, array
        if model_type == "olmo2" and config.tied and gguf_name == "token_embd.weight":
            yield "output.weight", array  # llama.cpp requires a head of an OLMo 2
    factors = rope_factors(config)
    if factors is not None:
        yield "rope_freqs.weight", factors.numpy()


def _choose_type(
    array: np.ndarray, storage: Storage, *, is_vocabulary: bool
) -> GGMLQuantizationType:
    """Return the GGML type of a tensor in a file of this storage.

    Vectors are float32. "q8_0" and "q4_0" have blocks of 32 numbers of a row: a matrix whose rows
    are not whole blocks is float16, and an embedding or head (`is_vocabulary`) is Q8_0 in both.
    """
    if array.ndim == 1:
        return GGMLQuantizationType.F32
    if storage in ("f32", "f16"):
        return _TYPES[storage][0]
    if array.shape[-1] % _BLOCK:
        return GGMLQuantizationType.F16
    return _TYPES["q8_0" if is_vocabulary else storage][0]
