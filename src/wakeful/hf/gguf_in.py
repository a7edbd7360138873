"""A GGUF file that wakeful wrote, read back as what was written.

Much of an architecture is in llama.cpp's code and not in a file, and Transformers' reader knows
fewer architectures and leaves some positions out. So a file of ours says besides, in two values
that others read past, what our decoder is and what the tokenizer's own files are.
"""

import json
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from wakeful.config.model import ModelConfig
from wakeful.config.schema import config_from_table
from wakeful.data.tokenizer import COMPANION_FILES, Tokenizer
from wakeful.errors import WakefulError
from wakeful.guard import wrap_errors
from wakeful.hf.families import FAMILIES
from wakeful.hf.gguf_architectures import ARCHITECTURES, convert_for_llama_cpp, make_gguf_namer
from wakeful.hf.gguf_header import read_gguf_header
from wakeful.hf.weights_out import stock_architecture

MODEL, TOKENIZER = "wakeful.model", "wakeful.tokenizer"
"""The keys of a decoder's configuration and of its tokenizer's files by name, both in JSON."""
_COMPUTED_TENSORS = ("rope_freqs.weight", "output.weight")
"""Further tensors that llama.cpp needs, computed from the configuration or the embedding."""


def read_gguf_config(path: Path) -> ModelConfig | None:
    """Return the decoder configuration that a GGUF file written by wakeful stores; None for a GGUF
    file from elsewhere.

    Raises:
        WakefulError: the header is unsound, or the stored configuration is of no architecture that
            a GGUF file can hold.
    """
    table = _read_json_value(path, MODEL)
    if table is None:
        return None
    # This checks the configuration of a whole run, whose training length has to fit the context: a
    # length of 1 always does.
    config = config_from_table({"model": table, "train": {"length": 1}}).model
    if stock_architecture(config)[0] not in ARCHITECTURES:
        raise WakefulError(f"{path}: {MODEL} is of no architecture that a GGUF file holds")
    return config


def read_gguf_tokenizer(path: Path) -> Tokenizer:
    """Return the tokenizer whose files a GGUF file written by wakeful stores.

    Raises:
        WakefulError: the header is unsound, or a stored file is not a tokenizer's.
    """
    files = _read_json_value(path, TOKENIZER) or {}
    known_files = ("tokenizer.json", *COMPANION_FILES)
    if not all(name in known_files and isinstance(text, str) for name, text in files.items()):
        raise WakefulError(f"{path}: {TOKENIZER} names a file that is not a tokenizer's")
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, "utf-8")
        return Tokenizer.load(folder)


def dump_tokenizer_files(tokenizer: Tokenizer) -> str:
    """Return a JSON object that has the text of each of a tokenizer's files, by the file's name."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(folder)
        return json.dumps({file.name: file.read_text("utf-8") for file in Path(folder).iterdir()})


def gguf_tensors(path: Path, config: ModelConfig) -> dict[str, Tensor]:
    """Read the tensors of a GGUF file that wakeful wrote, in float32, by their names in
    Transformers. Tensors that were computed for llama.cpp alone are left out.

    `config` is the decoder configuration that the file stores.

    Raises:
        WakefulError: the file is damaged, or a tensor has a type that cannot be unpacked.
    """
    model_type = stock_architecture(config)[0]
    family = FAMILIES[model_type]
    hf_names = [family.checkpoint_name(link.hf_name) for link in family.links(config)]
    gguf_name_of = make_gguf_namer(model_type, config.num_layers)
    hf_names_by_gguf_name = {gguf_name_of(hf_name): hf_name for hf_name in hf_names}
    hf_tensors: dict[str, Tensor] = {}
    with wrap_errors(f"{path} is damaged"):
        tensors = gguf.GGUFReader(path).tensors
    for tensor in tensors:
        is_of_model = tensor.name in hf_names_by_gguf_name  # such as an untied head, output.weight
        if not is_of_model and tensor.name in _COMPUTED_TENSORS:
            continue
        # The caller refuses an unexpected tensor by its own name.
        name = hf_names_by_gguf_name.get(tensor.name, tensor.name)
        try:
            array = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        except NotImplementedError as error:
            raise WakefulError(f"{path}: {tensor.name} cannot be read: {error}") from None
        hf_tensors[name] = torch.from_numpy(
            convert_for_llama_cpp(array, name, model_type, config, back=True)
        )
    return hf_tensors


def _read_json_value(path: Path, key: str) -> dict | None:
    """Return the JSON object that a GGUF file's metadata holds under a key; None without the key.

    Raises:
        WakefulError: the value is not a JSON object.
    """
    text = read_gguf_header(path).values.get(key)
    if text is None:
        return None
    try:
        table = json.loads(str(text))
    except (ValueError, RecursionError):
        table = None
    if not isinstance(table, dict):
        raise WakefulError(f"{path}: {key} holds no JSON object")
    return table
