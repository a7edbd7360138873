"""Rotary positions in the fields that readers before `rope_parameters` know."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    Gemma3Config,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PhiConfig,
)

from wakeful.hf.weights_out import write_config

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61,
         "intermediate_size": 48}  # fmt: skip
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 64,
          "low_freq_factor": 1.0, "high_freq_factor": 4.0}  # fmt: skip
NESTED = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
}
SCALED = NESTED | {"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}


@pytest.mark.parametrize(
    ("config", "older"),
    [
        (
            LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 1e5}),
            {"rope_theta": 1e5},
        ),
        (
            LlamaConfig(**SIZES, rope_parameters=LLAMA3 | {"rope_theta": 5e5}),
            {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        ),
        (
            PhiConfig(**SIZES, rope_parameters={
                "rope_type": "default", "rope_theta": 3e4, "partial_rotary_factor": 0.5}),
            {"rope_theta": 3e4, "partial_rotary_factor": 0.5},
        ),
        (
            GPTNeoXConfig(**SIZES, rope_parameters={
                "rope_type": "default", "rope_theta": 2e4, "partial_rotary_factor": 0.5}),
            {"rotary_emb_base": 2e4, "rotary_pct": 0.5},
        ),
        (
            Gemma3TextConfig(**SIZES, rope_parameters=NESTED,
                             layer_types=["sliding_attention", "full_attention"]),
            {"rope_theta": 1e6, "rope_local_base_freq": 2e4},
        ),
        (
            Gemma3TextConfig(**SIZES, rope_parameters=SCALED,
                             layer_types=["sliding_attention", "full_attention"]),
            {"rope_theta": 1e6, "rope_local_base_freq": 2e4,
             "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
        ),
    ],
    ids=["llama", "llama3", "partial", "neox", "nested", "nested, scaled"],
)  # fmt: skip
def test_both_are_written_and_read_alike(
    config: Any, older: dict[str, Any], tmp_path: Path
) -> None:
    write_config(config, tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())
    assert {name: table.get(name) for name in older} == older
    assert ("rope_scaling" in table) == ("rope_scaling" in older)
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters
    # Whoever reads the older fields alone has the same positions.
    del table["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(table))
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters


def test_so_are_those_of_the_text_part_of_a_model_that_sees(tmp_path: Path) -> None:
    text = Gemma3TextConfig(
        **SIZES, rope_parameters=SCALED, layer_types=["sliding_attention", "full_attention"]
    )
    write_config(Gemma3Config(text_config=text), tmp_path)
    table = json.loads((tmp_path / "config.json").read_text())
    part = table["text_config"]
    assert (part["rope_theta"], part["rope_local_base_freq"]) == (1e6, 2e4)
    assert part["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.text_config.rope_parameters == text.rope_parameters
    del part["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(table))
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.text_config.rope_parameters == text.rope_parameters
