"""Layers left out of Transformers' folders, against the same layers in memory."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

import wakeful
from probes.architectures import LLAMA, QWEN35
from verbs.test_diagnose import save_tokenizer
from wakeful.cli import main
from wakeful.errors import WakefulError
from wakeful.hf.dropping import drop_layers, shorten_config
from wakeful.probes.huggingface import decoder_blocks

DEEP = LLAMA | {"num_hidden_layers": 6, "vocab_size": 320}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
SLIDING = ["sliding_attention", "full_attention"]
MODELS = {
    "Llama": DEEP,
    "GptOss": DEEP | EXPERTS | {"head_dim": 8, "sliding_window": 4, "layer_types": SLIDING * 3},
    "Mixtral": DEEP | EXPERTS | {"sliding_window": None},
    # Layers 0 and 3 have no experts.
    "Qwen3Moe": DEEP
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8,
       "mlp_only_layers": [0, 3]},
    # Layers 0 to 2 have no experts.
    "DeepseekV3": DEEP
    | {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8,
       "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
       "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "first_k_dense_replace": 3},
    # "shared" layers read the tokens that the last "full" layer has chosen.
    "GlmMoeDsa": DEEP
    | {"num_key_value_heads": 4, "kv_lora_rank": 8, "q_lora_rank": 8, "qk_rope_head_dim": 8,
       "qk_nope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 4, "num_experts_per_tok": 2,
       "n_group": 1, "topk_group": 1, "moe_intermediate_size": 16, "index_topk": 4,
       "index_head_dim": 16, "index_n_heads": 2,
       "indexer_types": ["full", "full", "shared", "full", "shared", "shared"]},
    "Gemma2": DEEP | {"head_dim": 8, "sliding_window": 4, "query_pre_attn_scalar": 8},
    "SmolLM3": DEEP | {"no_rope_layers": [1, 1, 0, 1, 0, 1]},
    "GPT2": {"vocab_size": 320, "n_embd": 32, "n_layer": 6, "n_head": 4, "n_positions": 64},
    "GPTNeo": {"vocab_size": 320, "hidden_size": 32, "num_layers": 6, "num_heads": 4,
               "window_size": 4, "attention_types": [[["global", "local"], 3]],
               "bos_token_id": 0, "eos_token_id": 0},
    "GPTNeoX": DEEP | {"num_key_value_heads": 4},
    "Qwen3_5Text": DEEP | QWEN35 | {"layer_types": ["linear_attention", "linear_attention",
                                                    "full_attention"] * 2},
}  # fmt: skip
KEPT = [0, 2, 3, 5]


def model_of(name: str) -> PreTrainedModel:
    config = getattr(transformers, f"{name}Config")(**MODELS[name])
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def saved(name: str, folder: Path) -> tuple[PreTrainedModel, Path]:
    model = model_of(name)
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return model, folder


def cut(model: PreTrainedModel, layers: list[int]) -> PreTrainedModel:
    """Return the model with these of its own blocks, renumbered for the cache."""
    shorter: Any = copy.deepcopy(model)
    blocks = decoder_blocks(shorter, shorter.config.num_hidden_layers)
    chosen = [blocks[layer] for layer in layers]
    del blocks[:]
    blocks.extend(chosen)
    for place, block in enumerate(blocks):
        module: Any
        for module in block.modules():
            for number in ("layer_idx", "layer_id"):
                if hasattr(module, number):
                    setattr(module, number, place)
    shorter.config = shorten_config(shorter.config, layers)
    shorter.config._attn_implementation = "eager"  # the mask is made as attention wants it
    body = shorter.get_submodule(shorter.base_model_prefix)
    body.config = shorter.config
    return shorter


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_blocks_that_stay_compute_what_they_did(name: str, tmp_path: Path) -> None:
    model, folder = saved(name, tmp_path / "whole")
    kind = drop_layers(folder, KEPT, tmp_path / "shorter")
    assert kind == model.config.model_type
    read: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "shorter", attn_implementation="eager"
    ).eval()
    assert read.config.num_hidden_layers == len(KEPT)
    expected = cut(model, KEPT)
    tokens = torch.randint(3, 320, (2, 13), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        torch.testing.assert_close(read(tokens).logits, expected(tokens).logits)
        told = {"max_new_tokens": 9, "do_sample": False, "eos_token_id": None}
        ours = read.generate(tokens, **told)
        # Without a cache, each token from the whole text.
        plain = tokens
        for _ in range(9):
            plain = torch.cat([plain, read(plain).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(ours, plain)


SLICED = DEEP | {
    "head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 4, "sliding_window": 4,
    "vocab_size_per_layer_input": 320, "layer_types": SLIDING * 3,
}  # fmt: skip
LLAMA4 = DEEP | {"head_dim": 8, "num_local_experts": 4, "intermediate_size_mlp": 48,
                 "attention_chunk_size": 8}  # fmt: skip
LATER: dict[str, tuple[str, dict[str, Any], list[int]]] = {
    "a slice for each layer": ("Gemma4Text", SLICED | {"num_kv_shared_layers": 0}, KEPT),
    # Layers 1, 3 and 5 have wider heads and fewer of keys.
    "settings by number": (
        "Gemma4Text",
        SLICED | {"num_kv_shared_layers": 0, "global_head_dim": 16, "attention_k_eq_v": True,
                  "num_global_key_value_heads": 1},
        [0, 1, 2, 5],
    ),
    # Layers 4 and 5 read the keys and values of layers 2 and 3.
    "shared keys and values": ("Gemma4Text", SLICED | {"num_kv_shared_layers": 2}, [1, 2, 3, 5]),
    "experts everywhere": ("Llama4Text", LLAMA4 | {"interleave_moe_layer_step": 1}, KEPT),
    # Layers 1, 3 and 5.
    "experts by a list": ("Llama4Text", LLAMA4 | {"interleave_moe_layer_step": 2}, [0, 2, 3, 5]),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", LATER)
def test_what_later_architectures_say_of_layers_follows(name: str, tmp_path: Path) -> None:
    kind, options, kept = LATER[name]
    config = getattr(transformers, f"{kind}Config")(**options)
    torch.manual_seed(0)
    whole: Any = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    whole.save_pretrained(tmp_path / "whole")
    save_tokenizer(tmp_path / "whole")
    drop_layers(tmp_path / "whole", kept, tmp_path / "shorter")
    read: Any = AutoModelForCausalLM.from_pretrained(
        tmp_path / "shorter", attn_implementation="eager"
    ).eval()
    # A layer left out is one that hands on what it receives.
    for number, block in enumerate(decoder_blocks(whole, 6)):
        if number not in kept:
            block.forward = lambda x, *_, **__: x
    tokens = torch.randint(3, 320, (2, 13), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        ours, expected = (model(tokens, use_cache=False).logits for model in (read, whole))
        torch.testing.assert_close(ours, expected)
        told = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
        plain = tokens
        for _ in range(6):
            plain = torch.cat([plain, read(plain).logits[:, -1:].argmax(-1)], 1)
        assert torch.equal(read.generate(tokens, **told), plain)


def test_what_depends_on_the_number_of_layers_in_an_unknown_way_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = transformers.Gemma4TextConfig(**SLICED, num_kv_shared_layers=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "whole")
    save_tokenizer(tmp_path / "whole")
    file = tmp_path / "whole/model.safetensors"
    stored = load_file(file)
    (name,) = (each for each in stored if each.endswith("per_layer_model_projection.weight"))
    save_file(stored | {f"{name}_scale": torch.ones(24, 1)}, file, {"format": "pt"})
    with pytest.raises(WakefulError, match=r"weight_scale has shape \(24, 1\), in which no slice"):
        drop_layers(tmp_path / "whole", KEPT, tmp_path / "out")
    monkeypatch.setattr("wakeful.hf.dropping._SLICED", {})
    with pytest.raises(WakefulError, match=r"embed_tokens_per_layer\.weight depends on the number"):
        drop_layers(tmp_path / "whole", KEPT, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_blocks_behind_the_last_layer_stay_behind_it(tmp_path: Path) -> None:
    """Of a DeepSeek-V3 or GLM-4.5, one that predicts the token after the next."""
    model, folder = saved("DeepseekV3", tmp_path / "whole")
    assert model.config.num_nextn_predict_layers == 1
    file = folder / "model.safetensors"
    head = torch.randn(32, 64)
    save_file(load_file(file) | {"model.layers.6.eh_proj.weight": head}, file, {"format": "pt"})
    table = json.loads((folder / "config.json").read_text())
    table["quantization_config"] = {
        "quant_method": "fp8", "modules_to_not_convert": ["model.layers.6.eh_proj"]
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(table))
    drop_layers(folder, KEPT, tmp_path / "shorter")
    stored = load_file(tmp_path / "shorter/model.safetensors")
    assert torch.equal(stored["model.layers.4.eh_proj.weight"], head)
    assert not any(name.startswith(("model.layers.5.", "model.layers.6.")) for name in stored)
    table = json.loads((tmp_path / "shorter/config.json").read_text())
    assert table["num_nextn_predict_layers"] == 1
    skipped = table["quantization_config"]["modules_to_not_convert"]
    assert skipped == ["model.layers.4.eh_proj"]


def test_tables_of_quantized_modules_name_them_by_their_new_numbers() -> None:
    config = transformers.LlamaConfig(**DEEP)
    config.quantization_config = {  # as AutoRound's and compressed-tensors' are
        "extra_config": {
            "model.layers.1.mlp": {"bits": 8}, "model.layers.4.mlp": {"bits": 16}, "lm_head": {},
        },
        "ignore": [r"re:.*layers\.1\.mlp.*", r"re:.*layers\.4\.mlp.*", "re:.*lm_head"],
    }  # fmt: skip
    moved = shorten_config(config, [0, 4, 5]).to_dict()["quantization_config"]
    assert moved["extra_config"] == {"model.layers.1.mlp": {"bits": 16}, "lm_head": {}}
    assert moved["ignore"] == [r"re:.*layers\.1\.mlp.*", "re:.*lm_head"]


@pytest.mark.slow
def test_lists_of_layers_follow(tmp_path: Path) -> None:
    _, folder = saved("GptOss", tmp_path / "oss")
    drop_layers(folder, [1, 2, 3], tmp_path / "oss3")
    table = json.loads((tmp_path / "oss3/config.json").read_text())
    assert table["layer_types"] == ["full_attention", "sliding_attention", "full_attention"]
    _, folder = saved("Qwen3Moe", tmp_path / "moe")
    drop_layers(folder, [1, 3, 4], tmp_path / "moe3")
    assert json.loads((tmp_path / "moe3/config.json").read_text())["mlp_only_layers"] == [1]
    _, folder = saved("GPTNeo", tmp_path / "neo")
    drop_layers(folder, [1, 3, 4], tmp_path / "neo3")
    table = json.loads((tmp_path / "neo3/config.json").read_text())
    assert table["attention_types"] == [[["local", "local", "global"], 1]]


def test_layers_of_linear_attention_alone_are_refused(tmp_path: Path) -> None:
    _, folder = saved("Qwen3_5Text", tmp_path / "whole")
    with pytest.raises(WakefulError, match="linear attention alone"):
        drop_layers(folder, [0, 1, 3], tmp_path / "linear")
    assert not (tmp_path / "linear").exists()
    out = tmp_path / "shorter"
    assert main(["export", str(folder), str(out), "--layers", "1-3", "5"]) == 0
    kinds = json.loads((out / "config.json").read_text())["layer_types"]
    assert kinds == ["linear_attention", "full_attention"] * 2


def test_what_is_stored_is_copied_as_it_is(tmp_path: Path) -> None:
    model, folder = saved("Llama", tmp_path / "whole")
    table = json.loads((folder / "config.json").read_text())
    skipped = ["lm_head", "model.layers.1.mlp", "model.layers.4.mlp"]
    table["quantization_config"] = {"quant_method": "fp8", "modules_to_not_convert": skipped}
    (folder / "config.json").write_text(json.dumps(table))
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    drop_layers(folder, [0, 4, 5], tmp_path / "shorter", shard="40KB")
    template = tmp_path / "shorter" / "additional_chat_templates" / "tools.jinja"
    assert template.read_text() == "{{ tools }}"
    files = sorted((tmp_path / "shorter").glob("*.safetensors"))
    assert len(files) > 1
    stored = {k: v for file in files for k, v in load_file(file).items()}
    whole = model.state_dict()
    for place, layer in enumerate([0, 4, 5]):
        name = "mlp.down_proj.weight"
        assert torch.equal(
            stored[f"model.layers.{place}.{name}"], whole[f"model.layers.{layer}.{name}"]
        )
    assert not any(name.startswith("model.layers.3") for name in stored)
    table = json.loads((tmp_path / "shorter/config.json").read_text())
    kept = table["quantization_config"]["modules_to_not_convert"]
    assert kept == ["lm_head", "model.layers.1.mlp"]


@pytest.mark.slow
def test_the_command_line_keeps_layers_of_any_model(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    saved("Mixtral", tmp_path / "whole")
    out = tmp_path / "shorter"
    assert main(["export", str(tmp_path / "whole"), str(out), "--layers", "0-2", "5"]) == 0
    assert capsys.readouterr().out.startswith("mixtral: AutoModelForCausalLM")
    card = (out / "README.md").read_text("utf-8")
    assert "its layers 0–2, 5 (from 0), as they were stored" in card
    assert "--layers 0-2 5" in card
    assert wakeful.load(out).tokenizer is not None
    # A model that our decoder can be, too, and into one file.
    saved("Llama", tmp_path / "llama")
    wakeful.export(tmp_path / "llama", tmp_path / "l3", layers=["0", "3-5"])
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "l3").config.num_hidden_layers == 4


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([], "name the layers to keep"),
        ([2, 1], "in their order"),
        ([1, 1], "each once"),
        ([0, 6], "layers 0 to 5"),
        ([-1, 2], "layers 0 to 5"),
    ],
)
def test_wrong_layers_are_named(layers: list[int], words: str, tmp_path: Path) -> None:
    _, folder = saved("Llama", tmp_path / "whole")
    with pytest.raises(WakefulError, match=words):
        drop_layers(folder, layers, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_layer_that_would_become_another_kind_is_refused(tmp_path: Path) -> None:
    config = transformers.Qwen3MoeConfig(
        **MODELS["Qwen3Moe"] | {"mlp_only_layers": [], "decoder_sparse_step": 2}
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "whole")
    save_tokenizer(tmp_path / "whole")
    with pytest.raises(WakefulError, match="layer 2 would be another kind of layer as layer 1"):
        drop_layers(tmp_path / "whole", KEPT, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_architecture_that_has_no_such_configuration_is_refused() -> None:
    config = transformers.Gemma3nTextConfig()
    with pytest.raises(WakefulError, match=r"no gemma3n_text can be described .*\[0, 2, 34\]") as e:
        shorten_config(config, [0, 2, 34])
    assert "\n" not in str(e.value)


def test_numbers_that_enter_the_logits_are_refused(tmp_path: Path) -> None:
    config = transformers.GPT2Config(**MODELS["GPT2"] | {"scale_attn_by_inverse_layer_idx": True})
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "whole")
    with pytest.raises(WakefulError, match="scale_attn_by_inverse_layer_idx is set"):
        drop_layers(tmp_path / "whole", KEPT, tmp_path / "out")


SEES = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 6, "depth": 6,
        "num_attention_heads": 2, "num_heads": 2, "out_hidden_size": 32}  # fmt: skip
WHOLES = {
    "Gemma3": MODELS["Gemma2"] | {"layer_types": SLIDING * 3, "num_key_value_heads": 2},
    "Qwen3_5": MODELS["Qwen3_5Text"],
}


def whole_of(name: str, folder: Path) -> Any:
    """Save a model that sees, with as many layers of sight as of text."""
    kind = getattr(transformers, f"{name}Config")
    sight = {key: value for key, value in SEES.items() if hasattr(kind().vision_config, key)}
    config = kind(text_config=WHOLES[name], vision_config=sight)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
    model.save_pretrained(folder)
    save_tokenizer(folder)
    for beside in ("preprocessor_config.json", "chat_template.json"):
        (folder / beside).write_text("{}")
    return model


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "older"), [("Gemma3", False), ("Gemma3", True), ("Qwen3_5", False)]
)
def test_layers_of_the_text_part_of_a_model_that_sees(
    name: str, older: bool, tmp_path: Path
) -> None:
    """The other part's layers stay, though they are named alike; `older`: as checkpoints named
    the text part before it moved under `model`, which no checkpoint of Qwen3.5 did.
    """
    model = whole_of(name, tmp_path / "whole")
    table = json.loads((tmp_path / "whole/config.json").read_text())
    skipped = [
        "model.language_model.layers.1.mlp",
        "model.visual.blocks.1",
        "model.visual.layers.1",
    ]
    table["quantization_config"] = {"quant_method": "fp8", "modules_to_not_convert": skipped}
    file = tmp_path / "whole/model.safetensors"
    if older:
        stored = load_file(file)
        save_file(
            {name.replace("model.language_model.", "language_model.model."): tensor
             for name, tensor in stored.items()}, file, {"format": "pt"},
        )  # fmt: skip
    assert drop_layers(tmp_path / "whole", KEPT, tmp_path / "shorter") == table["model_type"]
    shorter = json.loads((tmp_path / "shorter/config.json").read_text())
    assert shorter["architectures"] == table["architectures"]
    assert shorter["text_config"]["num_hidden_layers"] == len(KEPT)
    assert shorter["vision_config"] | table["vision_config"] == shorter["vision_config"]
    for beside in ("preprocessor_config.json", "chat_template.json"):
        assert (tmp_path / "shorter" / beside).is_file()
    if not older:  # Transformers reads the older names of models that had them alone
        read = type(model).from_pretrained(tmp_path / "shorter").eval()
        layers = model.get_decoder().layers
        kept = [layers[layer] for layer in KEPT]
        for place, block in enumerate(kept):
            for module in block.modules():
                if hasattr(module, "layer_idx"):
                    module.layer_idx = place
        model.get_decoder().layers = torch.nn.ModuleList(kept)
        model.get_decoder().config.layer_types = read.config.text_config.layer_types
        model.get_decoder().config.num_hidden_layers = len(KEPT)
        tokens = torch.randint(3, 320, (2, 13), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            torch.testing.assert_close(read(tokens).logits, model(tokens).logits)
        assert read.state_dict().keys() == model.state_dict().keys()
    (tmp_path / "whole/config.json").write_text(json.dumps(table))
    config = transformers.AutoConfig.from_pretrained(tmp_path / "whole")
    moved = shorten_config(config, [0, 1]).to_dict()["quantization_config"][
        "modules_to_not_convert"
    ]
    assert moved == skipped
    moved = shorten_config(config, [1, 2]).to_dict()["quantization_config"][
        "modules_to_not_convert"
    ]
    assert moved == ["model.language_model.layers.0.mlp", *skipped[1:]]
