"""Our own exported models: every parameter under its own name."""

import torch
from transformers import PreTrainedConfig

from wakeful.config.model import ModelConfig
from wakeful.config.tables import from_table
from wakeful.errors import WakefulError
from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.families.base import Family, Link
from wakeful.hf.projections import projection_name
from wakeful.model.decoder import Decoder


def from_hf_config(config: PreTrainedConfig, max_length: int) -> ModelConfig:
    """Return our configuration, which an exported model's configuration holds under `parts`.

    Raises:
        WakefulError: the configuration has no `parts`, or `max_length` is neither 0 nor the model's
            context.
    """
    # Not `isinstance(config, WakefulConfig)`: an exported folder has a copy of that class.
    parts = getattr(config, "parts", None)
    if not isinstance(parts, dict):
        raise WakefulError(
            f"the configuration is a {type(config).__name__} without parts, which describe a "
            "model of ours: export the model anew"
        )
    decoder_config = from_table(ModelConfig, parts)
    if max_length not in (0, decoder_config.context):
        raise WakefulError(
            f"max_length = {max_length}, and the model's own context is {decoder_config.context}"
        )
    return decoder_config


def links(config: ModelConfig) -> list[Link]:
    """Return a link for every tensor of an exported model's checkpoint, each to one parameter."""
    with torch.device("meta"):  # only the names are needed
        names = [name for name, _ in Decoder(config).named_parameters()]
    return [
        Link(
            "lm_head.weight" if name == "head.weight" else f"decoder.{projection_name(name)}",
            (name,),
        )
        for name in names
    ]


FAMILY = Family(
    model_types=("wakeful",),
    prefix="model.",
    from_hf_config=from_hf_config,
    to_hf_config=WakefulConfig.of,
    links=links,
)
