"""OLMo 2: a Llama with norms after its sublayers and over all queries and all keys of a token."""

import dataclasses

from transformers import Olmo2Config, PreTrainedConfig

from wakeful.config.model import ModelConfig
from wakeful.hf.families import llama


def from_hf_config(config: PreTrainedConfig, max_length: int) -> ModelConfig:
    """Convert the configuration of an OLMo 2 to ours, with a context of `max_length` tokens (0: its
    own). It is a Llama's, but with norms after sublayers and over all queries and keys of a token.
    """
    as_llama = llama.from_hf_config(config, max_length)
    return dataclasses.replace(as_llama, placement="reordered", qk_norm=True, qk_norm_whole=True)


def to_hf_config(config: ModelConfig) -> PreTrainedConfig:
    """Return the nearest configuration of an OLMo 2. What an OLMo 2 cannot have is left out."""
    fields = llama.shared_fields(config) | {"attention_bias": config.out_bias, "pad_token_id": None}
    return Olmo2Config(**fields)


FAMILY = dataclasses.replace(
    llama.FAMILY, model_types=("olmo2",), from_hf_config=from_hf_config, to_hf_config=to_hf_config
)
