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
_LOCAL: dict[str, Callable[[int], bool]] = {
    "gemma2": lambda layer: layer % 2 == 0,
    "gemma3_text": lambda layer: layer % 6 < 5,
    "smollm3": lambda layer: layer % 4 == 3,
}
"""Local layers by architecture, as in llama.cpp's code; in a SmolLM3 those without positions."""
_LOCAL_THETA = 10_000.0
"""RoPE's base in a Gemma 3's local layers, which is in llama.cpp's code too."""
_BY_WIDTH = {"gemma2": 46, "gemma3_text": 62}
"""Layers of the models whose queries llama.cpp divides by the root of width / heads (27B)."""
_ROPE_PATTERN = "{arch}.attention.rope_pattern"
"""Key of the layers that have positions, in llama.cpp and not yet in gguf."""
_OURS = (
    "route", "depth", "normalizer", "embedding", "mlp_rotation", "qk_rotation", "stored_prefix",
    "relaxed_prefix", "scale_logits_by_layer", "logit_cap", "parallel",
)  # fmt: skip
"""Fields that are worth naming where no stock architecture is the model."""
_PAIRED = ("llama", "smollm3", "granite", "granite_swa")
"""Architectures whose rotary embedding pairs neighboring channels in llama.cpp."""
Value = int | float | str | list[bool]


def gguf_architecture(config: ModelConfig) -> tuple[str, ModelConfig]:
    """Return the `model_type` that a file can hold a folded decoder as, and what it says of it.

    Where llama.cpp has no window for an architecture, or has it in other layers, the context ends
    where the window does: up to there they are the same model.

    Raises:
        WakefulError: llama.cpp has no architecture that is this model.
    """
    kind = stock_architecture(config)[0]
    if config.has_short_window and not _has_windows(kind, config):
        config = _within_window(config)
        kind = stock_architecture(config)[0]
    _check(kind, config)
    return kind, config


def _has_windows(kind: str, config: ModelConfig) -> bool:
    """Tell whether llama.cpp's code of an architecture has windows in a model's local layers."""
    if kind == "granite_swa":  # whose layers share one base
        return config.local_theta in (0, config.rope_theta)
    return kind in ("gemma2", "gemma3_text") and _regular(kind, config)


def _local_layers(kind: str, num_layers: int) -> tuple[int, ...]:
    """Return the layers of a model that are local in llama.cpp's code."""
    return tuple(filter(_LOCAL[kind], range(num_layers)))


def _regular(kind: str, config: ModelConfig) -> bool:
    return config.local_layers == _local_layers(kind, config.num_layers)


def _within_window(config: ModelConfig) -> ModelConfig:
    shorter = dataclasses.replace(config, max_length=config.window, window=0)
    if config.local_theta == config.rope_theta and config.rope == "plain":
        return dataclasses.replace(shorter, local_layers=(), local_theta=0.0)
    return shorter


def _check(kind: str, config: ModelConfig) -> None:
    if kind not in ARCHITECTURES:
        raise WakefulError(
            f"a GGUF file holds one of {', '.join(ARCHITECTURES)}, and this model is a {kind}"
            f"{_unlike(config)}; export a folder instead"
        )
    for why in _limits(kind, config):
        raise WakefulError(f"{why}; export a folder instead")


def _unlike(config: ModelConfig) -> str:
    """Return which of a model's parts may be why it is no stock architecture."""
    usual = ModelConfig()
    odd = [
        f"model.{name} = {getattr(config, name)}"
        for name in _OURS
        if getattr(config, name) != getattr(usual, name)
    ]
    return f" ({', '.join(odd)})" if odd else ""


def _limits(kind: str, config: ModelConfig) -> Iterator[str]:
    """Yield what llama.cpp's code of an architecture cannot be, each with the reason."""
    gemma, granite = kind.startswith("gemma"), kind.startswith("granite")
    biased = config.bias or config.qkv_bias or config.out_bias
    rope, normalizer = build("ropes", config.rope), build("normalizers", config.normalizer)
    if biased and not (kind == "gpt2" or granite or (kind == "qwen2" and not config.bias)):
        yield f"model.attention_bias: GGUF files have no biases of a {kind}"
    if isinstance(rope, Llama3) and kind != "llama" and not granite:
        problem = f"model.rope = {config.rope}"
        yield f"{problem}: llama.cpp scales the RoPE of a llama so, not of a {kind}"
    if kind == "gpt2" and config.scale_logits_by_layer:
        yield "model.scale_logits_by_layer: llama.cpp does not scale a gpt2's logits by layer"
    if kind == "gpt2" and config.mlp == "gelu_exact":
        yield "model.mlp = gelu_exact: llama.cpp approximates a gpt2's GELU by tanh"
    if kind in ("gemma3_text", "smollm3") and not _regular(kind, config):
        yield (
            f"model.local_layers = {list(config.local_layers)}: llama.cpp's code fixes these "
            f"layers of a {kind}, here as {[*_local_layers(kind, config.num_layers)]}"
        )
    if kind == "gemma3_text" and config.local_theta != _LOCAL_THETA:
        yield (
            f"model.local_theta = {config.local_theta}: llama.cpp's code fixes it at "
            f"{_LOCAL_THETA} in a gemma3"
        )
    if granite and config.local_theta not in (0, config.rope_theta):
        yield f"model.local_theta = {config.local_theta}: llama.cpp has one base of RoPE a {kind}"
    if gemma and not config.tied:
        yield f"model.tied = False: in llama.cpp a {kind} has one matrix for embedding and head"
    if kind == "gemma2" and not (config.logit_cap and isinstance(normalizer, Softcap)):
        yield "model.logit_cap and model.normalizer: llama.cpp caps both logits of a gemma2"
    if kind == "gemma3_text" and config.logit_cap > 0:
        yield f"model.logit_cap = {config.logit_cap}: llama.cpp caps no logits of a gemma3"


def gguf_metadata(kind: str, config: ModelConfig) -> dict[str, Value]:
    """Return the metadata of a model that `stated` gave."""
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
        if isinstance(rope, Linear):
            values[Keys.Rope.SCALING_TYPE] = RopeScalingType.LINEAR.value
            values[Keys.Rope.SCALING_FACTOR] = rope.factor
    if kind == "phi3":
        values[Keys.Rope.SCALING_ORIG_CTX_LEN] = config.max_length
    if kind.startswith("granite"):
        scaled = config.embedding == "scaled"
        values |= {
            Keys.LLM.LOGIT_SCALE: 1.0,
            Keys.LLM.RESIDUAL_SCALE: 1.0,
            Keys.LLM.EMBEDDING_SCALE: math.sqrt(config.width) if scaled else 1.0,
            Keys.Attention.SCALE: (config.query_scalar or shape.head_width) ** -0.5,
        }
    if kind == "granite_swa":
        values[Keys.Attention.SLIDING_WINDOW] = config.window or config.max_length
        local = [layer in config.local_layers for layer in range(config.num_layers)]
        # llama.cpp wants a layer with a window: one as long as the context hides nothing.
        windows = (
            local if config.has_short_window else [layer == 0 for layer in range(config.num_layers)]
        )
        values[Keys.Attention.SLIDING_WINDOW_PATTERN] = windows
        if not config.local_theta:
            values[_ROPE_PATTERN] = [not is_local for is_local in local]
    if kind.startswith("gemma"):
        values[Keys.Attention.SLIDING_WINDOW] = config.window or config.max_length
        normalizer = build("normalizers", config.normalizer)
        if isinstance(normalizer, Softcap):
            values[Keys.LLM.ATTN_LOGIT_SOFTCAPPING] = normalizer.cap
            values[Keys.LLM.FINAL_LOGIT_SOFTCAPPING] = config.logit_cap
    return {key.format(arch=llama_cpp_architecture(kind)): value for key, value in values.items()}


def make_gguf_namer(kind: str, num_layers: int) -> Callable[[str], str]:
    """Return what gives a tensor of Transformers its name in a file."""
    name_map = get_tensor_name_map(ARCHITECTURES[kind], num_layers)

    def name(hf_name: str) -> str:
        if hf_name.endswith(SINKS):  # gguf knows sinks of other architectures alone
            return f"blk.{hf_name.split('.')[-3]}.attn_sinks.weight"
        gguf_name = name_map.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, hf_name
        return gguf_name

    return name


def convert_for_llama_cpp(
    array: np.ndarray, name: str, kind: str, config: ModelConfig, *, back: bool = False
) -> np.ndarray:
    """Return the numbers of a tensor that Transformers calls `name` as llama.cpp wants them, or
    with `back` the other way.
    """
    of_queries = name.endswith("q_norm.weight" if config.qk_norm else "q_proj.weight")
    factor = np.float32(_query_factor(kind, config))
    if of_queries and back:
        array = array / factor
    if kind in _PAIRED and ("q_proj" in name or "k_proj" in name):
        # The channels of each head that rotate together, i and i + d/2, stand beside each other.
        heads = config.num_heads if "q_proj" in name else config.shape.num_kv_heads
        half = len(array) // heads // 2
        parts = array.reshape(heads, *((half, 2) if back else (2, half)), *array.shape[1:])
        array = parts.swapaxes(1, 2).reshape(array.shape)
    if kind == "gpt2" and array.ndim == 2 and ".h." in name:
        array = array.T  # which Conv1D stores (in, out)
    if kind.startswith("gemma") and name.endswith("norm.weight"):
        array = array + np.float32(-1 if back else 1)  # Transformers adds it when it computes
    if of_queries and not back:
        array = array * factor
    return np.ascontiguousarray(array)


def llama_cpp_architecture(kind: str) -> str:
    """Return what llama.cpp calls an architecture."""
    return "gemma3" if kind == "gemma3_text" else kind


def rope_factors(config: ModelConfig) -> torch.Tensor | None:
    """Return what llama.cpp divides each of RoPE's frequencies by, if that is not one number."""
    rope: RopeScaling = build("ropes", config.rope)
    if not isinstance(rope, Llama3):
        return None
    width = config.rotary_width or config.shape.head_width
    powers = torch.arange(0, width, 2, dtype=torch.float64) / width
    frequencies = config.rope_theta**-powers
    return (frequencies / rope.scaled(frequencies)).float()


def _query_factor(kind: str, config: ModelConfig) -> float:
    """Return the factor for stored queries: llama.cpp divides logits by a root of its own choice,
    the model by that of `query_scalar`.
    """
    if kind.startswith("granite"):
        return 1.0
    usual = config.shape.head_width
    if config.num_layers == _BY_WIDTH.get(kind):
        usual = config.width // config.num_heads
    return math.sqrt(usual / (config.query_scalar or config.shape.head_width))
