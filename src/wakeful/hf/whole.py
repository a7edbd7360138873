"""A Transformers model with every weight from its checkpoint, or none."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from wakeful.errors import WakefulError
from wakeful.hf.bounds import check_bounds, read_config
from wakeful.hf.gguf_header import read_gguf_header
from wakeful.hf.shards import Shards


def whole_model(
    place: str | Path, *, dtype: torch.dtype | str, gguf: str = "", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return a causal language model from a folder, a hub name, or the file `gguf` in a folder.

    Transformers makes up what a checkpoint lacks, from random numbers, and only warns.

    Raises:
        WakefulError: a weight is missing, or a GGUF file's header is unsound.
        Exception: what Transformers raises.
    """
    options: dict[str, Any] = {"use_safetensors": True}
    if Path(place).is_dir() and not gguf and not trust_remote_code:
        _check_folder(Path(place))
    if gguf:
        read_gguf_header(Path(place) / gguf)
        options = {"gguf_file": gguf}
    options |= {"trust_remote_code": trust_remote_code, "output_loading_info": True}
    loaded: Any = AutoModelForCausalLM.from_pretrained(place, dtype=dtype, **options)
    model, found = loaded
    missing = sorted(found["missing_keys"])
    if missing:
        others = f" and {len(missing) - 1} others" if len(missing) > 1 else ""
        raise WakefulError(
            f"the checkpoint of {place} has no {missing[0]}{others}: it is not whole, or not of "
            "the architecture its configuration names"
        )
    assert isinstance(model, PreTrainedModel)
    return model


def _check_folder(folder: Path) -> None:
    with Shards(folder) as tensors:
        check_bounds(read_config(folder), len(tensors), tensors.num_bytes, folder)
