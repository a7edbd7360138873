"""softmax-1 of a stock model in its files: written when it is saved, read or refused by name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3Config, PreTrainedModel

import wakeful
from helpers import some_tokens
from hf.softmax1_models import build
from probes.architectures import build as tiny_llama
from verbs.test_diagnose import save_tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.checkpoint_reader import read_config, required_attention
from wakeful.hf.softmax1 import register_softmax1, softmax1_choice
from wakeful.loading.load import read_decoder
from wakeful.variants.implementations import (
    SOFTMAX1,
    attention_implementation,
    wrapped_attention_name,
)

FIELD = "attn_implementation"


def table_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text("utf-8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a Llama that was saved with softmax-1, and its tokenizer."""
    path = tmp_path_factory.mktemp("softmax1") / "llama"
    model = tiny_llama("Llama", vocab_size=320)
    model.set_attn_implementation(SOFTMAX1)
    model.save_pretrained(path)
    save_tokenizer(path)
    return path


def saved_again(folder: Path, tmp_path: Path, **options: Any) -> Path:
    AutoModelForCausalLM.from_pretrained(folder, **options).save_pretrained(tmp_path / "again")
    return tmp_path / "again"


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_oss"])
def test_transformers_reads_what_save_pretrained_wrote(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    model.save_pretrained(tmp_path)
    assert table_of(tmp_path)[FIELD] == SOFTMAX1
    read = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation="eager").eval()
    assert attention_implementation(read) == SOFTMAX1
    tokens = some_tokens(2, 9)
    torch.testing.assert_close(read(tokens).logits, model(tokens).logits, rtol=0, atol=1e-14)
    for own in (read, model):
        own.generation_config.max_new_tokens = 5
    continued = [own.generate(tokens, do_sample=False) for own in (read, model)]
    assert torch.equal(*continued)
    assert FIELD not in json.loads((tmp_path / "generation_config.json").read_text("utf-8"))


def test_another_save_keeps_it_and_another_attention_removes_it(
    folder: Path, tmp_path: Path
) -> None:
    assert table_of(saved_again(folder, tmp_path))[FIELD] == SOFTMAX1
    assert FIELD not in table_of(saved_again(folder, tmp_path, attn_implementation="sdpa"))


def test_other_models_files_are_unchanged(tmp_path: Path) -> None:
    register_softmax1()
    build("llama", "sdpa").save_pretrained(tmp_path)
    assert FIELD not in table_of(tmp_path)
    assert required_attention(read_config(tmp_path)) is None


@pytest.mark.parametrize("name", ["eager", "flash_attention_3", "a-stranger/kernel", {"": "eager"}])
def test_no_other_name_in_a_file_is_followed(name: Any, folder: Path, tmp_path: Path) -> None:
    other = saved_again(folder, tmp_path)
    (other / "config.json").write_text(json.dumps(table_of(other) | {FIELD: name}), "utf-8")
    assert required_attention(read_config(other)) is None


@pytest.mark.slow
def test_transformers_alone_refuses_it_by_name(folder: Path) -> None:
    program = (
        "import sys; from transformers import AutoModelForCausalLM;"
        "AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, folder], check=False, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert SOFTMAX1 in done.stderr.splitlines()[-1]


def test_a_part_of_a_model_has_it_of_its_own() -> None:
    config = Gemma3Config()
    assert softmax1_choice(config) is None
    config.text_config._attn_implementation = SOFTMAX1
    assert config.to_dict()[FIELD] == {"text_config": SOFTMAX1}
    read = Gemma3Config(**config.to_dict())
    assert read.text_config._attn_implementation == SOFTMAX1
    assert read.vision_config._attn_implementation != SOFTMAX1
    config._attn_implementation = SOFTMAX1
    assert config.to_dict()[FIELD] == {
        "": SOFTMAX1,
        "text_config": SOFTMAX1,
        "vision_config": SOFTMAX1,
    }


def test_a_quantized_cache_before_it_does_not_hide_it() -> None:
    config = AutoConfig.for_model("llama")
    config._attn_implementation = wrapped_attention_name(SOFTMAX1, "12345678")
    assert config.to_dict()[FIELD] == SOFTMAX1


def test_wakeful_loads_and_exports_it(folder: Path, tmp_path: Path) -> None:
    tokens = some_tokens(2, 9)
    stock: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder).eval()
    wanted = stock(tokens).logits
    ordinary = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    assert (ordinary(tokens).logits - wanted).abs().max() > 1e-3
    loaded = wakeful.load(folder)
    assert attention_implementation(loaded.module) == SOFTMAX1  # pyright: ignore[reportArgumentType]
    assert torch.equal(loaded.logits(tokens), wanted)
    decoder = read_decoder(folder).module
    assert decoder.config.normalizer == "softmax1"  # pyright: ignore
    assert wakeful.export(folder, tmp_path / "out") == "granite_swa"
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    torch.testing.assert_close(read(tokens).logits, wanted, rtol=0, atol=1e-4)


def test_a_folder_of_compressed_tensors_has_no_place_for_it(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(WakefulError, match=SOFTMAX1):
        wakeful.quantize(str(folder), "w8a8", save=str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
