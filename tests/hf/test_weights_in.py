"""Checkpoints of Transformers as our decoder: the same logits, and clear words where not."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import tokenizers
import torch
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file
from tokenizers import models, pre_tokenizers
from transformers import (
    AttentionInterface,
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

import wakeful
from helpers import some_tokens, tiny_decoder
from hf.softmax1_models import PLAIN, build, plain_attention
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.checkpoint_reader import smollm2_folder
from wakeful.hf.families import FAMILIES
from wakeful.hf.families.base import canonical_config
from wakeful.hf.families.granite import SWA
from wakeful.hf.weights_in import convert_hf_model
from wakeful.hf.weights_out import stock_architecture
from wakeful.loading.load import fetch_from_hub, locate_model, read_decoder
from wakeful.model.decoder import Decoder
from wakeful.optim import OrthoAdam
from wakeful.probes.watch import DecoderSource

COMMON: dict[str, Any] = {
    "vocab_size": 29,
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
NEOX: dict[str, Any] = COMMON | {"hidden_size": 32}
SMOLLM3: dict[str, Any] = COMMON | {"pad_token_id": 0}
GEMMA: dict[str, Any] = COMMON | {"pad_token_id": 0, "sliding_window": 32}
GEMMA3_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
GEMMA3_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
}
PHI3: dict[str, Any] = COMMON | {"hidden_size": 32, "pad_token_id": 0}
GRANITE: dict[str, Any] = COMMON | {"attention_multiplier": 7**-0.5}
GPT2: dict[str, Any] = {
    "vocab_size": 29, "n_embd": 24, "n_layer": 3, "n_head": 3, "n_positions": 32,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 24,
}  # fmt: skip
MODELS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**COMMON),
    "llama, grouped heads of odd width": LlamaConfig(**COMMON, num_key_value_heads=2, head_dim=10),
    "llama, biases, tied": LlamaConfig(
        **COMMON, num_key_value_heads=1, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True,
    ),
    "llama, attention biases": LlamaConfig(**COMMON, attention_bias=True),
    "llama, feed-forward biases": LlamaConfig(**COMMON, mlp_bias=True),
    "llama 3": LlamaConfig(**COMMON, rope_parameters=LLAMA3),
    "llama, linear scaling": LlamaConfig(
        **COMMON, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0}
    ),
    "mistral": MistralConfig(**COMMON, num_key_value_heads=2),
    "mistral, window": MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=8),
    "qwen2, window in some": Qwen2Config(
        **COMMON, num_key_value_heads=2, use_sliding_window=True, sliding_window=8,
        max_window_layers=1,
    ),
    "qwen3, window in some": Qwen3Config(
        **COMMON, num_key_value_heads=2, head_dim=6, use_sliding_window=True, sliding_window=5,
        max_window_layers=2,
    ),
    "qwen2": Qwen2Config(**COMMON, num_key_value_heads=2),
    "qwen3": Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=6),
    "qwen3, biases, tied": Qwen3Config(
        **COMMON, num_key_value_heads=4, head_dim=6, attention_bias=True, tie_word_embeddings=True
    ),
    "smollm3": SmolLM3Config(
        **SMOLLM3, num_key_value_heads=2, no_rope_layers=[1, 0, 1], tie_word_embeddings=False
    ),
    "smollm3, biases, tied": SmolLM3Config(
        **SMOLLM3, num_key_value_heads=1, no_rope_layers=[0, 0, 1, 1, 1], attention_bias=True,
        mlp_bias=True, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
    ),
    "smollm3, window": SmolLM3Config(
        **SMOLLM3, num_key_value_heads=2, use_sliding_window=True, sliding_window=8,
        no_rope_layers=[1, 0, 1],
    ),
    "olmo2": Olmo2Config(**COMMON, num_key_value_heads=2),
    "olmo2, biases, tied": Olmo2Config(
        **COMMON, num_key_value_heads=1, attention_bias=True, tie_word_embeddings=True
    ),
    "gemma2": Gemma2Config(
        **GEMMA, num_key_value_heads=2, head_dim=10, query_pre_attn_scalar=7,
        attn_logit_softcapping=2.0, final_logit_softcapping=3.0, tie_word_embeddings=False,
        attn_implementation="eager",
    ),
    "gemma2, biases, tied, no caps": Gemma2Config(
        **GEMMA, num_key_value_heads=4, head_dim=6, attention_bias=True,
        attn_logit_softcapping=None, final_logit_softcapping=None,
    ),
    "gemma2, window": Gemma2Config(
        **GEMMA | {"sliding_window": 7}, num_key_value_heads=2, head_dim=10,
        attn_implementation="eager",  # up to 5.19 Transformers chooses SDPA, which knows no cap
    ),
    "gemma3_text, window": Gemma3TextConfig(
        **GEMMA | {"sliding_window": 7}, num_key_value_heads=2, head_dim=10,
        layer_types=GEMMA3_KINDS, rope_parameters=GEMMA3_ROPES,
    ),
    "gemma3_text": Gemma3TextConfig(
        **GEMMA, num_key_value_heads=2, head_dim=10, query_pre_attn_scalar=7,
        layer_types=GEMMA3_KINDS, rope_parameters=GEMMA3_ROPES, final_logit_softcapping=3.0,
        tie_word_embeddings=False,
    ),
    "gemma3_text, one key head, tied": Gemma3TextConfig(
        **GEMMA, num_key_value_heads=1, head_dim=6, sliding_window_pattern=2
    ),
    "phi3": Phi3Config(
        **PHI3, rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.5}
    ),
    "phi3, window": Phi3Config(
        **PHI3, sliding_window=9,
        rope_parameters={"rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
    "phi3, grouped heads, tied": Phi3Config(
        **PHI3, num_key_value_heads=2, tie_word_embeddings=True,
        rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.75},
    ),
    "gpt2": GPT2Config(**GPT2, n_inner=50),
    "gpt2, untied, exact, by layer": GPT2Config(
        **GPT2, tie_word_embeddings=False, activation_function="gelu",
        scale_attn_by_inverse_layer_idx=True,
    ),
    "gpt_neox": GPTNeoXConfig(**NEOX, rotary_pct=0.5),
    "gpt_neox, in series, no attention biases, tied": GPTNeoXConfig(
        **NEOX, rotary_pct=1.0, use_parallel_residual=False, attention_bias=False,
        tie_word_embeddings=True,
    ),
    "granite": GraniteConfig(**GRANITE, embedding_multiplier=24**0.5, mlp_bias=True),
    "granite, tied": GraniteConfig(
        **GRANITE, head_dim=10, attention_bias=True, embedding_multiplier=24**0.5,
        rope_parameters=LLAMA3,
    ),
}  # fmt: skip
if SWA is not None:
    MODELS |= {
        "granite_swa": SWA(
            **GRANITE, num_key_value_heads=2, attention_bias=True, sliding_window=32
        ),
        "granite_swa, window": SWA(
            **GRANITE, num_key_value_heads=1, sliding_window=8, tie_word_embeddings=False,
            layer_rope_theta=[1e4, 100.0, 100.0],
        ),
        "granite_swa, no positions": SWA(
            **GRANITE, num_key_value_heads=4, sliding_window=32, mlp_bias=True,
            layer_rope_theta=[0.0, 500.0, 0.0], embedding_multiplier=24**0.5,
            rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
        ),
    }  # fmt: skip


def random_model(config: PreTrainedConfig, *, std: float = 0.3) -> PreTrainedModel:
    """Return Transformers' model with every parameter, biases and norms included, off its start."""
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=std)
    return model


def test_a_folder_has_the_name_that_it_is_asked_for_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert locate_model(tmp_path / "link").name == "link"
    monkeypatch.chdir(tmp_path / "real")
    assert locate_model(".").name == "real"


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_checkpoint_has_transformers_logits(name: str, tmp_path: Path) -> None:
    theirs = random_model(MODELS[name])
    theirs.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    read = read_decoder(tmp_path)
    ours = read.decoder()
    assert read.name == tmp_path.name
    assert not ours.training
    assert not any(parameter.requires_grad for parameter in ours.parameters())
    assert ours.num_parameters()["total"] == theirs.num_parameters()
    assert (ours.head.weight is ours.embed.weight) == read.decoder().config.tied
    tokens = some_tokens(2, 31)
    wanted = theirs(tokens).logits
    assert wanted.std() > 0.1
    torch.testing.assert_close(ours(tokens), wanted, rtol=0, atol=1e-5)
    # One token after another, and beside padding.
    cache = ours.new_cache(2, 31)
    pieces = [ours(piece, cache=cache) for piece in tokens.split([17, 1, 13], 1)]
    torch.testing.assert_close(torch.cat(pieces, 1), wanted, rtol=0, atol=1e-5)
    valid = torch.arange(31) >= torch.tensor([[0], [5]])
    alone = theirs(tokens[1:, 5:]).logits
    torch.testing.assert_close(ours(tokens, valid=valid)[1:, 5:], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", MODELS)
def test_theirs_and_ours_describe_one_another(name: str) -> None:
    theirs = MODELS[name]
    ours = FAMILIES[theirs.model_type].from_hf_config(theirs, 0)
    kind, back = stock_architecture(ours)
    assert kind == ("llama" if name == "mistral" else theirs.model_type)
    assert canonical_config(FAMILIES[kind].from_hf_config(back, 0)) == canonical_config(ours)
    with torch.device("meta"):
        empty = dict(Decoder(ours).named_parameters())
    for link in FAMILIES[kind].links(ours):
        # Halves of whole numbers: a norm stored less one comes back to the bit.
        tensor = (
            torch.randint(-9, 9, link.join([empty[part] for part in link.decoder_names]).shape) / 2
        )
        parts = link.split(tensor)
        assert [part.shape for part in parts] == [empty[part].shape for part in link.decoder_names]
        assert torch.equal(link.join(parts), tensor)


@pytest.mark.parametrize(
    "name", [
        "qwen3, biases, tied", "gpt_neox", "gpt2", "smollm3", "olmo2", "gemma2", "gemma3_text",
    ],
)  # fmt: skip
def test_probes_and_rotations_know_the_new_parts(name: str, tmp_path: Path) -> None:
    theirs = random_model(MODELS[name])
    theirs.save_pretrained(tmp_path)
    decoder = read_decoder(tmp_path).decoder()
    for line in OrthoAdam(decoder.named_parameters()).plan():
        assert (len(line.shape) == 2) == bool(line.axes)
        assert not line.axes or line.shape[line.axes[0]] == decoder.config.width
    events: list[Any] = []
    tokens = some_tokens(1, 9)
    with torch.no_grad(), DecoderSource(decoder).open(events.append):
        decoder(tokens)
    assert [event.layer for event in events if hasattr(event, "q")] == [0, 1, 2]
    hidden = [event for event in events if not hasattr(event, "q")]
    assert len(hidden) == 4
    wanted = theirs(tokens, output_hidden_states=True).hidden_states
    torch.testing.assert_close(hidden[2].h, wanted[2], rtol=0, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("name", ["llama", "olmo2"])
def test_a_window_that_the_architectures_code_ignores_is_none(name: str, tmp_path: Path) -> None:
    theirs = random_model(MODELS[name])
    theirs.save_pretrained(tmp_path)
    table = json.loads((tmp_path / "config.json").read_text()) | {"sliding_window": 4}
    (tmp_path / "config.json").write_text(json.dumps(table))
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config.sliding_window == 4
    tokens = some_tokens(1, 9)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    decoder = read_decoder(tmp_path).decoder()
    torch.testing.assert_close(decoder(tokens), stock(tokens).logits, rtol=0, atol=1e-5)


def test_a_head_that_is_missing_has_its_own_name(tmp_path: Path) -> None:
    random_model(MODELS["llama"]).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    del stored["lm_head.weight"]
    save_file(stored, file, {"format": "pt"})
    with pytest.raises(WakefulError, match=r"has no tensor lm_head\.weight: it is not"):
        read_decoder(tmp_path)


def test_weights_are_fetched_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Repositories hold them again, for other programs: gpt-oss's in folders, Mistral's beside."""
    there = ["config.json", "model-00001-of-00002.safetensors", "tokenizer.json",
             "chat_template.jinja", "additional_chat_templates/tools.jinja",
             "original/model.safetensors", "original/config.json",
             "metal/model.bin", "consolidated.safetensors"]  # fmt: skip

    def fetch(name: str, **patterns: Any) -> str:
        kept = filter_repo_objects(there, **patterns)
        (tmp_path / name).write_text("\n".join(kept))
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert fetch_from_hub("oss").read_text().split("\n") == there[:5]


def test_old_names_and_constants_are_understood(tmp_path: Path) -> None:
    theirs = random_model(MODELS["gpt2"])
    theirs.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    old = {name.removeprefix("transformer."): value for name, value in load_file(file).items()}
    old["h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
    save_file(old, file)
    tokens = some_tokens(1, 9)
    torch.testing.assert_close(
        read_decoder(tmp_path).decoder()(tokens), theirs(tokens).logits, rtol=0, atol=1e-5
    )
    pythia = random_model(MODELS["gpt_neox"])
    pythia.save_pretrained(tmp_path / "neox")
    file = tmp_path / "neox" / "model.safetensors"
    old = load_file(file)
    assert "embed_out.weight" in old
    old["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(old, file)
    torch.testing.assert_close(
        read_decoder(tmp_path / "neox").decoder()(tokens), pythia(tokens).logits, rtol=0, atol=1e-5
    )


def test_types_and_the_tokenizer(tmp_path: Path) -> None:
    theirs = random_model(MODELS["llama"]).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    assert read_decoder(tmp_path).decoder().embed.weight.dtype == torch.float32
    half = read_decoder(tmp_path, dtype=torch.bfloat16)
    assert half.decoder().embed.weight.dtype == torch.bfloat16
    with pytest.raises(WakefulError, match="has no tokenizer"):
        _ = half.tokenizer
    inner = tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 1, "<end>": 2}, unk_token="a"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>").save_pretrained(tmp_path)
    tokenizer = read_decoder(tmp_path).wakeful_tokenizer
    assert tokenizer.encode("b a b") == [1, 0, 1]
    assert tokenizer.end_of_text == 2


REFUSED: list[tuple[PreTrainedConfig, str]] = [
    (LlamaConfig(**COMMON, hidden_act="gelu"), "hidden_act = 'gelu', and only 'silu'"),
    (GPT2Config(**GPT2, activation_function="relu"), "activation_function = 'relu'"),
    (GPT2Config(**GPT2, scale_attn_weights=False), "scale_attn_weights = False"),
    (GPT2Config(**GPT2, add_cross_attention=True), "add_cross_attention = True"),
    (
        MistralConfig(
            **COMMON,
            num_key_value_heads=2,
            sliding_window=8,
            rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 500.0},
        ),
        "sliding_window = 8, shorter than its context of 32, in layers whose positions are scaled",
    ),
    (
        LlamaConfig(
            **COMMON, rope_parameters={"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4}
        ),
        "rope_parameters.rope_type = 'yarn'",
    ),
    (
        LlamaConfig(**COMMON, rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "rope_parameters.partial_rotary_factor = 0.5",
    ),
    (
        Phi3Config(
            **PHI3,
            original_max_position_embeddings=16,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "short_factor": [1.0] * 4,
                "long_factor": [2.0] * 4,
            },
        ),
        "rope_parameters.rope_type = 'longrope'",
    ),
    (
        SmolLM3Config(
            **SMOLLM3,
            num_key_value_heads=2,
            use_sliding_window=True,
            sliding_window=8,
            no_rope_layers=[1, 0, 1],
            layer_types=["sliding_attention"] * 3,
        ),
        "in layers whose positions are scaled or of two kinds; within max_length=8 they agree",
    ),
    (Olmo2Config(**COMMON, hidden_act="relu"), "hidden_act = 'relu', and only 'silu'"),
    (
        Gemma2Config(**GEMMA, head_dim=6, hidden_activation="gelu"),
        "hidden_activation = 'gelu', and only 'gelu_pytorch_tanh'",
    ),
    (
        Gemma3TextConfig(**GEMMA, head_dim=6, use_bidirectional_attention=True),
        "use_bidirectional_attention = True",
    ),
    (
        Gemma3TextConfig(**GEMMA, head_dim=6, attn_logit_softcapping=5.0),
        "attn_logit_softcapping = 5.0, and only None",
    ),
    (
        Gemma3TextConfig(
            **GEMMA,
            head_dim=6,
            rope_parameters={
                "sliding_attention": GEMMA3_ROPES["full_attention"],
                "full_attention": GEMMA3_ROPES["sliding_attention"],
            },
        ),
        "rope_parameters.sliding_attention.rope_type = 'linear', and only 'default'",
    ),
    (Phi3Config(**PHI3, hidden_act="gelu"), "hidden_act = 'gelu', and only 'silu'"),
]


@pytest.mark.parametrize(("config", "words"), REFUSED)
def test_what_our_decoder_cannot_be_is_named(
    config: PreTrainedConfig, words: str, tmp_path: Path
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(WakefulError) as caught:
        read_decoder(tmp_path)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@torch.no_grad()
def test_a_window_that_covers_the_context_asked_for_is_none(tmp_path: Path) -> None:
    theirs = random_model(MistralConfig(**COMMON, num_key_value_heads=2, sliding_window=8))
    theirs.save_pretrained(tmp_path)
    read = read_decoder(tmp_path, max_length=8)
    assert read.decoder().config.max_length == 8
    tokens = some_tokens(2, 8)
    torch.testing.assert_close(read.decoder()(tokens), theirs(tokens).logits, rtol=0, atol=1e-5)
    with pytest.raises(WakefulError, match="max_length = 99 is longer than the model's context"):
        read_decoder(tmp_path, max_length=99)


def broken(folder: Path, what: str) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.mlp.up_proj.weight"
    match what:
        case "cut short":
            file.write_bytes(file.read_bytes()[:-50])
        case "gone":
            file.unlink()
        case "pickled":
            file.rename(folder / "pytorch_model.bin")
        case "missing":
            del tensors[name]
        case "unexpected":
            tensors["model.layers.1.mlp.up_proj.bias"] = torch.zeros(44)
        case "shape":
            tensors[name] = tensors[name].T.contiguous()
        case "integers":
            tensors[name] = tensors[name].to(torch.int8)
        case "one dimension":
            tensors[name] = tensors[name].flatten()
        case "architecture":
            edit(folder, model_type="bloom")
        case "linear attention":
            edit(folder, model_type="qwen3_5_text")
        case "unknown architecture":
            edit(folder, model_type="no such thing")
        case "quantized":
            edit(folder, quantization_config={"quant_method": "awq"})
        case "no configuration":
            (folder / "config.json").unlink()
        case "not JSON":
            (folder / "config.json").write_text("{")
    if what in ("missing", "unexpected", "shape", "integers", "one dimension"):
        save_file(tensors, file)


def edit(folder: Path, **fields: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("cut short", "model.safetensors is not a whole safetensors file"),
        ("gone", "has no model.safetensors"),
        ("pickled", "it has pytorch_model.bin, and pickled weights are never read"),
        ("missing", "has no tensor model.layers.1.mlp.up_proj.weight"),
        ("unexpected", "has a tensor model.layers.1.mlp.up_proj.bias"),
        (
            "shape",
            r"up_proj.weight has shape \(24, 44\), and the configuration makes it \(44, 24\)",
        ),
        ("integers", "up_proj.weight is stored as torch.int8"),
        ("one dimension", r"up_proj.weight has shape \(1056,\)"),
        ("architecture", "our decoder cannot be a bloom: it can be gemma2, gemma3_text, gpt2"),
        ("linear attention", "cannot be a qwen3_5_text: it has layers of linear attention"),
        ("unknown architecture", "config.json"),
        ("quantized", "quant_method = 'awq'"),
        ("no configuration", "it has no config.json"),
        ("not JSON", "config.json"),
    ],
)
def test_damage_is_one_clear_line(what: str, words: str, tmp_path: Path) -> None:
    random_model(MODELS["llama"]).save_pretrained(tmp_path)
    broken(tmp_path, what)
    with pytest.raises(WakefulError, match=words) as caught:
        read_decoder(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    random_model(MODELS["llama"]).save_pretrained(tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(WakefulError, match=f"the shard {shard} is missing"):
        read_decoder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(WakefulError, match="is not an index of shards"):
        read_decoder(tmp_path)


def test_what_is_nowhere_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(WakefulError, match="is not a folder, GGUF file or run directory here") as e:
        read_decoder("nobody/no-such-model")
    assert "\n" not in str(e.value)
    with pytest.raises(WakefulError, match="is not a folder"):
        read_decoder("no/such/folder/at all")


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3", "gpt2"])
def test_a_model_in_memory_with_softmax1_keeps_it(name: str) -> None:
    model = build(name)
    tokens = some_tokens(2, 11)
    with torch.no_grad():
        wanted = model(tokens).logits
        decoder = convert_hf_model(model)
        assert decoder.config.normalizer == "softmax1"
        torch.testing.assert_close(decoder(tokens), wanted, rtol=1e-5, atol=1e-5)
        model.set_attn_implementation("sdpa")
        assert not torch.allclose(model(tokens).logits, wanted, atol=1e-3)
    assert convert_hf_model(model).config.normalizer == "softmax"


def test_an_attention_that_our_decoder_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    capped = build("gemma2", attn_logit_softcapping=2.0)
    with pytest.raises(WakefulError, match=r"its own normalizer is softcap\(cap=2\.0\)"):
        convert_hf_model(capped)
    monkeypatch.setitem(AttentionInterface._global_mapping, PLAIN, plain_attention)
    model = build("llama", "eager")
    assert convert_hf_model(model).config.normalizer == "softmax"
    model.config._attn_implementation = PLAIN
    with pytest.raises(WakefulError, match="'plain_softmax1', which is not one of Transformers'"):
        convert_hf_model(model)


def test_our_own_class_is_known_by_its_parts_wherever_it_was_loaded_from() -> None:
    decoder = tiny_decoder(stored_prefix=2)
    parts = dataclasses.asdict(decoder.config)
    family, copied = FAMILIES["wakeful"], PreTrainedConfig(parts=parts)  # of a folder's own code
    assert family.from_hf_config(copied, 0) == decoder.config
    assert family.from_hf_config(copied, decoder.config.context) == decoder.config
    with pytest.raises(WakefulError, match="and the model's own context is 22"):
        family.from_hf_config(copied, 24)
    with pytest.raises(WakefulError, match="without parts"):
        family.from_hf_config(PreTrainedConfig(), 0)


def smollm2() -> Path:
    try:
        return smollm2_folder()
    except WakefulError as error:
        pytest.skip(str(error))


@pytest.mark.slow
@torch.no_grad()
def test_the_real_smollm2(tmp_path: Path) -> None:
    folder = smollm2()
    read = read_decoder(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = torch.tensor([read.tokenizer.encode(Path(torch.__file__).read_text()[:400])])
    assert tokens.shape[1] > 80
    wanted = theirs(tokens).logits
    assert wanted.abs().max() > 10
    torch.testing.assert_close(read.decoder()(tokens), wanted, rtol=0, atol=1e-4)
    assert read.tokenizer.decode(tokens[0].tolist()) == Path(torch.__file__).read_text()[:400]
    shutil.rmtree(tmp_path)


@pytest.mark.slow
def test_8_bit_floats_are_unpacked(tmp_path: Path) -> None:
    folder = tmp_path / "fp8"
    config = LlamaConfig(
        **(COMMON | {"vocab_size": 270, "hidden_size": 256, "intermediate_size": 256})
    )
    theirs = random_model(config)
    theirs.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    state = theirs.state_dict()
    for name in [name for name in tensors if "_proj" in name]:
        blocks = tensors[name].unflatten(1, (-1, 128)).unflatten(0, (-1, 128))
        scale = blocks.abs().amax((1, 3)) / 448
        packed = (blocks / scale[:, None, :, None]).to(torch.float8_e4m3fn)
        numbers = packed.float() * scale[:, None, :, None]
        state[name].copy_(numbers.flatten(2, 3).flatten(0, 1))
        tensors[name] = packed.flatten(2, 3).flatten(0, 1)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    said = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    edit(folder, quantization_config=said | {"modules_to_not_convert": ["lm_head"]})
    Tokenizer.train(["def f(x):\n    return x + 1\n"] * 5, 270).save(folder)
    tokens = some_tokens(2, 12)
    expected = theirs(tokens).logits
    for dtype in (torch.float32, "auto"):
        decoder = read_decoder(folder, dtype=dtype).decoder()
        torch.testing.assert_close(decoder(tokens), expected, rtol=1e-4, atol=1e-5)
    wakeful.export(folder, tmp_path / "out")
    torch.testing.assert_close(wakeful.load(tmp_path / "out").logits(tokens), expected)
