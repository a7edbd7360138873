"""Tiny random models of every architecture that is watched."""

import torch
import transformers
from transformers import AutoModelForCausalLM

from wakeful.probes.attention import Entropy, Importance, Sinks, Values
from wakeful.probes.base import AttentionEvent, HiddenEvent, Probe, gather
from wakeful.probes.hidden import BlockInfluence, OutlierChannels, Outliers, Smoothing
from wakeful.probes.rank import Ranks

LLAMA = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
NO_GQA = LLAMA | {"num_key_value_heads": 4}
GPT2 = {
    "vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QWEN35 = {
    "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip

ARCHITECTURES = {
    "Llama": LLAMA,
    "Mistral": LLAMA | {"sliding_window": 6},
    "Qwen2": LLAMA,
    "Qwen3": LLAMA | {"head_dim": 16},
    "Qwen3_5Text": LLAMA | QWEN35 | {"layer_types": ["full_attention"] * 2},
    "Gemma": LLAMA | {"head_dim": 8},
    "Gemma2": LLAMA
    | {"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": 0.05,
       "query_pre_attn_scalar": 4},
    "Gemma3Text": LLAMA
    | {"head_dim": 8, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]},
    "GPT2": GPT2,
    "GPT2-by-layer": GPT2 | {"scale_attn_by_inverse_layer_idx": True},
    "GPTNeoX": NO_GQA,
    "OPT": {
        "vocab_size": 61, "hidden_size": 32, "ffn_dim": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, "word_embed_proj_dim": 32,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    },
    "Phi": NO_GQA,
    "Phi3": LLAMA,
    "StableLm": LLAMA,
    "Olmo2": LLAMA,
    "Starcoder2": LLAMA | {"sliding_window": 7},
    "Cohere": LLAMA,
    "Granite": LLAMA | {"attention_multiplier": 0.3},
    "SmolLM3": LLAMA,
    "GPTBigCode": GPT2,
    "Llama4Text": LLAMA
    | {"head_dim": 8, "attention_chunk_size": 8, "num_local_experts": 2,
       "intermediate_size_mlp": 32},
    "DeepseekV3": NO_GQA
    | {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
       "v_head_dim": 12, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1,
       "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 1},
    # The first layer alone has no experts.
    "Qwen3Moe": LLAMA
    | {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
       "mlp_only_layers": [0]},
    "Afmoe": LLAMA
    | {"head_dim": 8, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
       "num_experts": 2, "num_experts_per_tok": 1, "num_shared_experts": 1,
       "num_dense_layers": 1, "moe_intermediate_size": 16},
    "GptOss": LLAMA
    | {"head_dim": 8, "sliding_window": 6, "num_local_experts": 2, "num_experts_per_tok": 1},
}  # fmt: skip
EAGER_ONLY = {"Gemma2", "GptOss"}


def build(name, implementation="sdpa", **changes):
    """The same random model each time, with large weights: attention far from uniform."""
    torch.manual_seed(7)
    config_class = getattr(transformers, name.split("-")[0] + "Config")
    config = config_class(**ARCHITECTURES[name] | changes)
    if name in EAGER_ONLY:
        implementation = "eager"
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation=implementation, dtype=torch.float32
    ).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
        for block_name, parameter in model.named_parameters():
            if block_name.endswith("sinks"):
                parameter.normal_(0, 1)
    return model


class Recorder(Probe):
    def __init__(self):
        self.attention, self.hidden = {}, {}

    def see(self, event):
        if isinstance(event, AttentionEvent):
            self.attention[event.layer] = event
        elif isinstance(event, HiddenEvent):
            self.hidden[event.layer] = event

    def rows(self):
        return gather([])


def all_probes():
    return (
        Sinks(), Entropy(), Importance(), Values(), Outliers(), Smoothing(), OutlierChannels(),
        BlockInfluence(), Ranks(),
    )  # fmt: skip


def batch(padding):
    ids = torch.randint(3, 61, (2, 23), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    if padding == "left":
        mask[1, :9] = 0
    if padding == "right":
        mask[1, 15:] = 0
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}
