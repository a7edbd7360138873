"""A decoder in memory as a model of Transformers, without copying its weights."""

import torch

from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.modeling import WakefulForCausalLM
from wakeful.hf.projections import named
from wakeful.model.decoder import Decoder


def as_transformers(decoder: Decoder, *, end_of_text: int | None = None) -> WakefulForCausalLM:
    """Return our Transformers class around the very parameters of a decoder, which it shares.

    `end_of_text` is where `generate()` stops.
    """
    config = WakefulConfig.of(decoder.config, eos_token_id=end_of_text)
    with torch.device("meta"):
        model = WakefulForCausalLM(config)
    own = decoder.state_dict(keep_vars=True)
    state = {"lm_head.weight": own.pop("head.weight")}
    state |= {f"model.decoder.{named(name)}": parameter for name, parameter in own.items()}
    model.load_state_dict(state, assign=True)
    model.to(decoder.embed.weight.device)  # pyright: ignore[reportArgumentType]  only buffers move
    return model.train(decoder.training)
