"""Metadata of architectures in GGUF files, and the models of ours that llama.cpp can run.

Keys and names are the package gguf's. Much of an architecture is not in the file but in llama.cpp:
which layers have a window or no positions, what queries are divided by, where norms stand. What it
would take for another model is refused here.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator

import numpy as np
import torch
from gguf import MODEL_ARCH, Keys, RopeScalingType, get_tensor_name_map

from wakeful.config.model import ModelConfig
from wakeful.errors import WakefulError
from wakeful.hf.families.granite import SINKS
from wakeful.hf.weights_out import stock_architecture
from wakeful.normalizers import Softcap
from wakeful.ropes import Linear, Llama3, RopeScaling
from wakeful.variants import build

ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2, "qwen3": MODEL_ARCH.QWEN3,
    "smollm3": MODEL_ARCH.SMOLLM3, "phi3": MODEL_ARCH.PHI3, "olmo2": MODEL_ARCH.OLMO2,
    "gemma2": MODEL_ARCH.GEMMA2, "gemma3_text": MODEL_ARCH.GEMMA3, "gpt2": MODEL_ARCH.GPT2,
    "granite": MODEL_ARCH.GRANITE, "granite_swa": MODEL_ARCH.GRANITE,
}  # fmt: skip
"""By Transformers' `model_type`, what gguf calls its tensors as; a Mistral is a Llama."""
_IS_LOCAL: dict[str, Callable[[int], bool]] = {
    "gemma2": lambda layer: layer % 2 == 0,
    "gemma3_text": lambda layer: layer % 6 < 5,
    "smollm3": lambda layer: layer % 4 == 3,
}
"""Local layers by architecture, as in llama.cpp's code; in a SmolLM3 those without positions."""
_LOCAL_THETA = 10_000.0
"""RoPE's base in a Gemma 3's local layers, which is in llama.cpp's code too."""
_LARGEST_MODELS = {"gemma2": 46, "gemma3_text": 62}
"""Numbers of layers of the models of 27B, whose queries llama.cpp divides by the root of width /
heads."""
_ROPE_PATTERN = "{arch}.attention.rope_pattern"
"""Key of the layers that have positions, in llama.cpp and not yet in gguf."""
_UNUSUAL_FIELDS = (
    "route", "depth", "normalizer", "embedding", "mlp_rotation", "qk_rotation", "stored_prefix",
    "scale_logits_by_layer", "logit_cap", "parallel",
)  # fmt: skip
"""Fields of parts that no or few stock architectures have, to be named in an error."""
_PAIRS_NEIGHBORS = ("llama", "smollm3", "granite", "granite_swa")
"""Architectures whose rotary embedding pairs neighboring channels in llama.cpp."""
Value = int | float | str | list[bool]


def gguf_architecture(config: ModelConfig) -> tuple[str, ModelConfig]:
    """Return the `model_type` that a GGUF file stores a decoder as, and the configuration of the
    stored model.

    The two configurations differ only where llama.cpp has no sliding window for the architecture,
    or has it in other layers. The stored model then has a context as long as the window: up to that
    length, the window hides nothing.

    Raises:
        WakefulError: llama.cpp has no architecture that is this model.
    """
    model_type = stock_architecture(config)[0]
    if config.has_short_window and not _has_windows(model_type, config):
        config = _shorten_to_window(config)
        model_type = stock_architecture(config)[0]
    _check_llama_cpp(model_type, config)
    return model_type, config


def _has_windows(model_type: str, config: ModelConfig) -> bool:
    """Tell whether llama.cpp's code for an architecture applies the window in those layers that are
    local in this model.
    """
    if model_type == "granite_swa":
        # The file lists the local layers. In llama.cpp they have the RoPE base of the others, or no
        # RoPE.
        return config.local_theta in (0, config.rope_theta)
    return model_type in ("gemma2", "gemma3_text") and _has_usual_layers(model_type, config)


def _local_layers(model_type: str, num_layers: int) -> tuple[int, ...]:
    """Return the layers that llama.cpp's code of an architecture treats as local."""
    return tuple(filter(_IS_LOCAL[model_type], range(num_layers)))


def _has_usual_layers(model_type: str, config: ModelConfig) -> bool:
    """Tell whether a model's local layers are those that llama.cpp's code has for its type."""
    return config.local_layers == _local_layers(model_type, config.num_layers)


def _shorten_to_window(config: ModelConfig) -> ModelConfig:
    """Return the configuration with a context as long as its window, which then hides nothing, and
    without local layers if they differed in nothing else.
    """
    shorter = dataclasses.replace(config, max_length=config.window, window=0)
    # The RoPE of local layers has a base of its own and is never scaled.
    if config.local_theta == config.rope_theta and config.rope == "plain":
        return dataclasses.replace(shorter, local_layers=(), local_theta=0.0)
    return shorter


def _check_llama_cpp(model_type: str, config: ModelConfig) -> None:
    """Raise `WakefulError` where llama.cpp's code cannot run a model of this type."""
    if model_type not in ARCHITECTURES:
        raise WakefulError(
            f"a GGUF file holds one of {', '.join(ARCHITECTURES)}, and this model is a {model_type}"
            f"{_list_unusual_fields(config)}; export a folder instead"
        )
    for problem in _find_unsupported(model_type, config):
        raise WakefulError(f"{problem}; export a folder instead")


def _list_unusual_fields(config: ModelConfig) -> str:
    """Return the end of an error message, which lists in parentheses why a model may be no stock
    architecture: its values of `_UNUSUAL_FIELDS` that are not the default; "" if there are none.
    """
    default = ModelConfig()
    unusual = [
        f"model.{name} = {getattr(config, name)}"
        for name in _UNUSUAL_FIELDS
        if getattr(config, name) != getattr(default, name)
    ]
    return f" ({', '.join(unusual)})" if unusual else ""


def _find_unsupported(model_type: str, config: ModelConfig) -> Iterator[str]:
    """Yield a sentence for each field of a model that has a value which llama.cpp's code for its
    `model_type` cannot run.
    """
    is_gemma, is_granite = model_type.startswith("gemma"), model_type.startswith("granite")
    has_bias = config.bias or config.qkv_bias or config.out_bias
    rope, normalizer = build("ropes", config.rope), build("normalizers", config.normalizer)
    # A qwen2 has biases of q, k and v, and none in its feed-forward network.
    is_qwen2_bias = model_type == "qwen2" and not config.bias
    if has_bias and not (is_qwen2_bias or is_granite or model_type == "gpt2"):
        yield f"model.attention_bias: GGUF files have no biases of a {model_type}"
    if isinstance(rope, Llama3) and model_type != "llama" and not is_granite:
        problem = f"model.rope = {config.rope}"
        yield f"{problem}: llama.cpp scales only the RoPE of a llama so, not of a {model_type}"
    if model_type == "gpt2" and config.scale_logits_by_layer:
        yield "model.scale_logits_by_layer: llama.cpp does not scale a gpt2's logits by layer"
    if model_type == "gpt2" and config.mlp == "gelu_exact":
        yield "model.mlp = gelu_exact: llama.cpp approximates a gpt2's GELU by tanh"
    if model_type in ("gemma3_text", "smollm3") and not _has_usual_layers(model_type, config):
        yield (
            f"model.local_layers = {list(config.local_layers)}: llama.cpp's code fixes these "
            f"layers of a {model_type}, here as {[*_local_layers(model_type, config.num_layers)]}"
        )
    if model_type == "gemma3_text" and config.local_theta != _LOCAL_THETA:
        yield (
            f"model.local_theta = {config.local_theta}: llama.cpp's code fixes it at "
            f"{_LOCAL_THETA} in a gemma3"
        )
    if is_granite and config.local_theta not in (0, config.rope_theta):
        field = f"model.local_theta = {config.local_theta}"
        yield f"{field}: in llama.cpp a {model_type} has one base of RoPE"
    if is_gemma and not config.tied:
        yield f"model.tied = False: in llama.cpp a {model_type} ties its head to its embedding"
    if model_type == "gemma2" and not (config.logit_cap and isinstance(normalizer, Softcap)):
        yield "model.logit_cap and model.normalizer: llama.cpp caps both logits of a gemma2"
    if model_type == "gemma3_text" and config.logit_cap > 0:
        yield f"model.logit_cap = {config.logit_cap}: llama.cpp caps no logits of a gemma3"


def gguf_metadata(model_type: str, config: ModelConfig) -> dict[str, Value]:
    """Return the metadata of a GGUF file, by key, for a model as `gguf_architecture` returns it."""
    shape = config.shape
    values: dict[str, Value] = {
        Keys.LLM.CONTEXT_LENGTH: config.max_length,
        Keys.LLM.EMBEDDING_LENGTH: config.width,
        Keys.LLM.BLOCK_COUNT: config.num_layers,
        Keys.LLM.FEED_FORWARD_LENGTH: config.mlp_width,
        Keys.LLM.VOCAB_SIZE: config.vocab_size,
        Keys.Attention.HEAD_COUNT: config.num_heads,
        Keys.Attention.HEAD_COUNT_KV: shape.num_kv_heads,
    }
    eps = "LAYERNORM_EPS" if config.norm == "layernorm" else "LAYERNORM_RMS_EPS"
    values[getattr(Keys.Attention, eps)] = config.norm_eps
    if config.positions == "rotary":
        values |= {
            Keys.Rope.DIMENSION_COUNT: config.rotary_width or shape.head_width,
            Keys.Rope.FREQ_BASE: config.rope_theta,
            Keys.Attention.KEY_LENGTH: shape.head_width,
            Keys.Attention.VALUE_LENGTH: shape.head_width,
        }
        rope = build("ropes", config.rope)
        if isinstance(rope, Linear):  # Llama 3's scaling is a tensor of the file (`rope_factors`)
            values[Keys.Rope.SCALING_TYPE] = RopeScalingType.LINEAR.value
            values[Keys.Rope.SCALING_FACTOR] = rope.factor
    if model_type == "phi3":  # llama.cpp scales its RoPE past this length, so never here
        values[Keys.Rope.SCALING_ORIG_CTX_LEN] = config.max_length
    if model_type.startswith("granite"):
        scaled = config.embedding == "scaled"
        values |= {
            Keys.LLM.LOGIT_SCALE: 1.0,
            Keys.LLM.RESIDUAL_SCALE: 1.0,
            Keys.LLM.EMBEDDING_SCALE: math.sqrt(config.width) if scaled else 1.0,
            Keys.Attention.SCALE: (config.query_scalar or shape.head_width) ** -0.5,
        }
    if model_type == "granite_swa":
        values[Keys.Attention.SLIDING_WINDOW] = config.window or config.max_length
        local = [layer in config.local_layers for layer in range(config.num_layers)]
        pattern = local
        if not config.has_short_window:
            # llama.cpp needs a layer with a window: one as long as the context hides nothing.
            pattern = [layer == 0 for layer in range(config.num_layers)]
        values[Keys.Attention.SLIDING_WINDOW_PATTERN] = pattern
        if not config.local_theta:  # local layers have no RoPE
            values[_ROPE_PATTERN] = [not is_local for is_local in local]
    if model_type.startswith("gemma"):
        values[Keys.Attention.SLIDING_WINDOW] = config.window or config.max_length
        normalizer = build("normalizers", config.normalizer)
        if isinstance(normalizer, Softcap):
            values[Keys.LLM.ATTN_LOGIT_SOFTCAPPING] = normalizer.cap
            values[Keys.LLM.FINAL_LOGIT_SOFTCAPPING] = config.logit_cap
    return {
        key.format(arch=llama_cpp_architecture(model_type)): value for key, value in values.items()
    }


def make_gguf_namer(model_type: str, num_layers: int) -> Callable[[str], str]:
    """Return a function that converts a tensor's name in Transformers to its name in a GGUF file
    of this architecture.
    """
    name_map = get_tensor_name_map(ARCHITECTURES[model_type], num_layers)

    def gguf_name_of(hf_name: str) -> str:
        """Convert a name such as "model.layers.0.self_attn.q_proj.weight"."""
        if hf_name.endswith(SINKS):  # the package gguf has no name for a Granite's sinks
            layer = hf_name.split(".")[-3]  # of "….layers.0.self_attn.sinks"
            return f"blk.{layer}.attn_sinks.weight"
        gguf_name = name_map.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, hf_name
        return gguf_name

    return gguf_name_of


def convert_for_llama_cpp(
    array: np.ndarray, name: str, model_type: str, config: ModelConfig, *, back: bool = False
) -> np.ndarray:
    """Convert a tensor that Transformers calls `name` to the layout and scale of llama.cpp; with
    `back`, convert llama.cpp's tensor to Transformers'.

    llama.cpp reorders the rotary channels of some architectures, transposes GPT-2's matrices and
    adds one to Gemma's norms. It may also divide attention logits by another root than the model
    does, which a factor on the queries makes up for.
    """
    # A norm of queries would undo a factor in their projection: its weight takes the factor.
    scales_queries = name.endswith("q_norm.weight" if config.qk_norm else "q_proj.weight")
    factor = np.float32(_query_factor(model_type, config))
    if scales_queries and back:  # the steps back are taken in the reverse order
        array = array / factor
    if model_type in _PAIRS_NEIGHBORS and ("q_proj" in name or "k_proj" in name):
        # RoPE rotates the channels i and i + d/2 of a head together; llama.cpp has such a pair
        # side by side.
        heads = config.num_heads if "q_proj" in name else config.shape.num_kv_heads
        half = len(array) // heads // 2
        channels = (half, 2) if back else (2, half)
        by_head = array.reshape(heads, *channels, *array.shape[1:])
        array = by_head.swapaxes(1, 2).reshape(array.shape)
    if model_type == "gpt2" and array.ndim == 2 and ".h." in name:
        array = array.T  # Transformers' Conv1D stores a layer's matrices (in, out)
    if model_type.startswith("gemma") and name.endswith("norm.weight"):
        array = array + np.float32(-1 if back else 1)  # Transformers adds it when it computes
    if scales_queries and not back:
        array = array * factor
    return np.ascontiguousarray(array)


def llama_cpp_architecture(model_type: str) -> str:
    """Return llama.cpp's name of the architecture that Transformers calls `model_type`."""
    return "gemma3" if model_type == "gemma3_text" else model_type


def rope_factors(config: ModelConfig) -> torch.Tensor | None:
    """Return the numbers (d/2,) by which llama.cpp divides the RoPE frequencies for Llama 3's
    scaling; None for other RoPE. (A single factor for all frequencies is in the file's metadata.)
    """
    rope: RopeScaling = build("ropes", config.rope)
    if not isinstance(rope, Llama3):
        return None
    width = config.rotary_width or config.shape.head_width
    powers = torch.arange(0, width, 2, dtype=torch.float64) / width
    frequencies = config.rope_theta**-powers
    return (frequencies / rope.scaled(frequencies)).float()


def _query_factor(model_type: str, config: ModelConfig) -> float:
    """Return the factor by which a file's query weights are multiplied, so that attention logits
    come out right: llama.cpp divides them by the square root of a width that its code chooses, and
    the model divides them by √query_scalar.
    """
    if model_type.startswith("granite"):  # a file stores its scale of attention logits
        return 1.0
    llama_cpp_scalar = config.shape.head_width
    # For the largest models, which it knows by their number of layers, llama.cpp takes another one.
    if config.num_layers == _LARGEST_MODELS.get(model_type):
        llama_cpp_scalar = config.width // config.num_heads
    return math.sqrt(llama_cpp_scalar / (config.query_scalar or config.shape.head_width))
