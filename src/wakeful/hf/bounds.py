"""Whether a Transformers configuration can be that of the weights beside it.

Transformers builds a model from its configuration first and looks at the weights afterwards: what
the configuration says takes time and memory by itself. Here it is held to the files' sizes.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from wakeful.errors import WakefulError

_MOST_BUFFERED = 2**30
"""Numbers in masks and tables, which no file holds."""


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
