"""The decoder: GPT-2-like or Llama-like by the parts of its `ModelConfig`."""

from wakeful.config.model import ModelConfig
from wakeful.model.decoder import Decoder
from wakeful.model.generate import generate_tokens
from wakeful.model.initialize import initialize

__all__ = ["Decoder", "ModelConfig", "generate_tokens", "initialize"]
