"""A Transformers model with every weight from its checkpoint, or none.

Transformers (5.23.0) builds a model from its configuration first and looks at the weights
afterwards. Sizes that differ from the weights' it then refuses itself. But it builds layers without
end where `num_hidden_layers` is 10⁹, fills memory for weights that the checkpoint does not hold,
and makes tables that no file holds (GPT-J's positions) as large as the configuration says. So the
configuration is held to the files' sizes before.
"""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from wakeful.errors import WakefulError
from wakeful.hf.gguf_header import read_gguf_header
from wakeful.hf.shards import Shards

_MOST_BUFFERED = 2**30
"""Numbers in masks and tables, which no file holds."""


def whole_model(
    place: str | Path, *, dtype: torch.dtype | str, gguf: str = "", trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return a causal language model from a folder, a hub name, or the file `gguf` in a folder.

    Transformers fills what a checkpoint does not hold with random numbers, and only warns.

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


def read_config(folder: Path) -> PreTrainedConfig:
    """Return the configuration of a Transformers folder; no code beside it is run.

    Raises:
        WakefulError: it is missing, damaged, or of an architecture that is not known.
    """
    if (folder / "adapter_config.json").is_file():
        raise WakefulError(
            f"{folder} holds an adapter, which names a model elsewhere: merge the two, and name "
            "the folder of that"
        )
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # Transformers raises nothing narrower
        raise _no_model(folder, error) from None


def check_bounds(config: PreTrainedConfig, num_tensors: int, num_bytes: int, place: Path) -> None:
    """Raise `WakefulError` unless so many tensors and bytes can be the model's weights.

    A number takes half a byte or more. The model is built without memory for its weights.
    """
    try:
        layers = config.get_text_config().num_hidden_layers
        if layers > num_tensors:
            raise WakefulError(f"{place} has {num_tensors} tensors, too few for {layers} layers")
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except WakefulError:
        raise
    except Exception as error:  # Transformers raises nothing narrower
        raise _no_model(place, error) from None
    numbers = sum(parameter.numel() for parameter in model.parameters())
    buffered = sum(buffer.numel() for buffer in model.buffers())
    if numbers > 2 * num_bytes or buffered > _MOST_BUFFERED:
        raise WakefulError(
            f"{place}: config.json describes {numbers:,} weights and {buffered:,} other numbers, "
            f"and the weights' files have {num_bytes:,} bytes"
        )


def _no_model(folder: Path, error: BaseException) -> WakefulError:
    line = (str(error).strip() or type(error).__name__).split("\n", 1)[0]
    return WakefulError(f"{folder / 'config.json'} describes no model: {line}")
