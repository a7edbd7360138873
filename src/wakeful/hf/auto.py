"""Our models among those that `AutoModelForCausalLM` knows."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from wakeful.hf.configuration import WakefulConfig
from wakeful.hf.modeling import WakefulForCausalLM, WakefulModel
from wakeful.hf.quantized import QuantizedConfig, QuantizedForCausalLM


def register() -> None:
    """Let Transformers' Auto classes load the model type "wakeful"; again changes nothing."""
    AutoConfig.register(WakefulConfig.model_type, WakefulConfig, exist_ok=True)
    AutoModel.register(WakefulConfig, WakefulModel, exist_ok=True)
    AutoModelForCausalLM.register(WakefulConfig, WakefulForCausalLM, exist_ok=True)
    AutoConfig.register(QuantizedConfig.model_type, QuantizedConfig, exist_ok=True)
    AutoModelForCausalLM.register(QuantizedConfig, QuantizedForCausalLM, exist_ok=True)  # pyright: ignore[reportArgumentType]
