"""Our configuration and cache by the names that other tools read and set."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from helpers import some_tokens
from hf.models import VARIANTS, pair
from wakeful.errors import WakefulError
from wakeful.hf.cache import CACHE
from wakeful.hf.configuration import HF_FIELDS, WakefulConfig

WINDOWED = {"num_layers": 4, "local_layers": (0, 2), "window": 8, "logit_cap": 5.0}


def test_saved_names_are_those_of_other_models(tmp_path: Path) -> None:
    config = WakefulConfig(parts=WINDOWED | {"width": 64, "num_kv_heads": 2, "vocab_size": 300})
    config.save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text("utf-8"))
    expected = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 344, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 512, "tie_word_embeddings": False, "initializer_range": 0.02,
        "final_logit_softcapping": 5.0, "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    assert expected.keys() == set(HF_FIELDS)
    for name, value in expected.items():
        assert saved[name] == config.to_dict()[name] == getattr(config, name) == value
    again = AutoConfig.from_pretrained(tmp_path)
    assert again.parts == config.parts
    assert again.to_dict() == WakefulConfig(**again.to_dict()).to_dict()
    saved["num_hidden_layers"] = 3
    (tmp_path / "config.json").write_text(json.dumps(saved), "utf-8")
    with pytest.raises(WakefulError, match="num_hidden_layers = 3, and its parts say 4"):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("name", "value", "part", "set_to"),
    [
        ("vocab_size", 31, "vocab_size", 31),
        ("hidden_size", 24, "width", 24),
        ("intermediate_size", 40, "mlp_width", 40),
        ("num_hidden_layers", 2, "num_layers", 2),
        ("num_attention_heads", 8, "num_heads", 8),
        ("num_key_value_heads", 1, "num_kv_heads", 1),
        ("num_key_value_heads", None, "num_kv_heads", 0),
        ("head_dim", 2, "head_width", 2),
        ("max_position_embeddings", 99, "max_length", 99),
        ("tie_word_embeddings", True, "tied", True),
        ("initializer_range", 0.5, "init_std", 0.5),
        ("final_logit_softcapping", None, "logit_cap", 0.0),
        ("sliding_window", None, "window", 0),
        ("sliding_window", 5, "window", 5),
        ("layer_types", ["full_attention"] * 3 + ["sliding_attention"], "local_layers", (3,)),
    ],
)
def test_names_can_be_set(name: str, value: Any, part: str, set_to: Any, tmp_path: Path) -> None:
    config = WakefulConfig(parts=WINDOWED | {"width": 32})
    config.save_pretrained(tmp_path)
    changed = AutoConfig.from_pretrained(tmp_path, **{name: value})
    assert changed.parts == config.parts | {part: set_to}
    assert getattr(changed, name) == (value if value is not None or part == "window" else
                                      {"num_kv_heads": 4, "logit_cap": None}[part])  # fmt: skip
    assert getattr(changed.model, part) == set_to


def test_names_alone_describe_a_model_and_wrong_ones_name_the_part() -> None:
    config = WakefulConfig(hidden_size=24, num_attention_heads=2, max_position_embeddings=9)
    assert (config.model.width, config.model.num_heads, config.model.max_length) == (24, 2, 9)
    stored = WakefulConfig(parts={"stored_prefix": 2}, max_position_embeddings=510)
    stored.max_position_embeddings = 20
    assert stored.model.max_length == 22
    with pytest.raises(WakefulError, match=r"set parts\.local_layers"):
        config.sliding_window = 4
    with pytest.raises(WakefulError, match="layer_types has 'linear_attention'"):
        config.layer_types = ["linear_attention"] * 8
    config.num_attention_heads = 7
    with pytest.raises(WakefulError, match=r"num_heads = 7 does not divide model\.width = 24"):
        _ = config.model


@torch.no_grad()
def test_a_model_is_loaded_with_fewer_layers(tmp_path: Path) -> None:
    _, model = pair(local_layers=(1, 3), window=4)
    model.save_pretrained(tmp_path)
    short = AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=2, dtype="auto").eval()
    assert len(short.model.decoder.blocks) == 2
    tokens = some_tokens(2, 9)
    model.config.num_hidden_layers = 2  # an early exit
    assert torch.equal(model(tokens).logits, short(tokens).logits)
    model.config.num_hidden_layers = 4
    assert not torch.equal(model(tokens).logits, short(tokens).logits)


@pytest.mark.parametrize("name", ["vanilla", "svformer", "denseformer"])
@torch.no_grad()
def test_an_early_exit_drafts_what_all_layers_would_write(name: str) -> None:
    _, model = pair(**VARIANTS[name])
    tokens = some_tokens(1, 6)
    options = {"max_new_tokens": 12, "do_sample": False}
    plain = model.generate(tokens, **options)
    assert torch.equal(model.generate(tokens, assistant_early_exit=2, **options), plain)
    assert model.config.num_hidden_layers == 4


@torch.no_grad()
def test_a_cache_has_a_length_and_is_true() -> None:
    _, model = pair(route="svformer")
    cache = model(some_tokens(1, 12), use_cache=True).get(CACHE)
    assert len(cache) == 4
    assert cache
    assert cache.get_seq_length() == 12
    shapes = [(layer.keys.shape, layer.values.shape) for layer in cache.layers]
    heads, none = (1, 2, 12, 8), (1, 0, 12, 8)
    assert shapes == [(heads, heads)] + 3 * [(heads, none)]


@torch.no_grad()
def test_routes_that_read_tokens_take_embeddings_beside_them() -> None:
    _, model = pair(route="value_embedding")
    tokens = some_tokens(2, 7)
    embeds = model.get_input_embeddings()(tokens)
    expected = model(tokens).logits
    assert torch.equal(model(tokens, inputs_embeds=embeds).logits, expected)
    moved = model(tokens, inputs_embeds=embeds + 1.0).logits
    assert not torch.equal(moved, expected)
    with pytest.raises(WakefulError, match=r"give tokens \(input_ids\), beside embeddings too"):
        model(inputs_embeds=embeds)
    options = {"max_new_tokens": 5, "do_sample": False}
    plain = model.generate(tokens, **options)
    assert torch.equal(model.generate(tokens, inputs_embeds=embeds, **options), plain)
    with pytest.raises(WakefulError, match="either input_ids or inputs_embeds"):
        pair()[1](tokens, inputs_embeds=embeds)


def test_continuous_batching_is_refused_in_one_line() -> None:
    _, model = pair()
    with pytest.raises(WakefulError, match=r"generate_batch .* call generate\(\)"):
        model.generate_batch([[1, 2], [3]], max_new_tokens=2)
