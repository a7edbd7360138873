"""The verb export: what it refuses before it reads a model, and what it makes."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, GPT2Config

import wakeful
from helpers import since
from hf.gguf_models import GEMMA2, TEXTS, decoder
from test_cli import fails
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.gguf_out import export_gguf
from wakeful.hf.weights_out import export_decoder
from wakeful.loading.load import read_decoder
from wakeful.loading.model import Model
from wakeful.quantization import quantize_module


@pytest.fixture(scope="module")
def model() -> Model:
    tokenizer = Tokenizer.train(TEXTS, vocab_size=270)
    return wakeful.load(decoder(tokenizer.vocab_size), tokenizer=tokenizer)


@pytest.fixture
def folder(model: Model, tmp_path: Path) -> Path:
    """Give a folder of Transformers."""
    export_decoder(model.decoder(), tmp_path / "llama", tokenizer=model.wakeful_tokenizer)
    return tmp_path / "llama"


@pytest.mark.parametrize(
    ("out", "given", "said"),
    [
        ("out", {"gguf": "q8_0"}, r"--gguf q8_0: it is for a file, .* ends in \.gguf"),
        ("out", {"gguf": "f16"}, "--gguf f16: it is for a file"),
        ("m.gguf", {"dtype": "bfloat16"}, "--dtype bfloat16: it is for a folder; --gguf says"),
        ("m.gguf", {"gguf": "f32", "dtype": "float16"}, "--dtype float16: it is for a folder"),
    ],
)
def test_options_of_the_other_form_are_refused(
    out: str, given: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(WakefulError, match=said):  # before the model is looked for
        wakeful.export(tmp_path / "nowhere", tmp_path / out, **given)
    assert not (tmp_path / out).exists()


def test_the_command_line_refuses_them_in_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    said = fails(capsys, "export", str(folder), str(out), "--gguf", "q8_0")
    assert "--gguf q8_0: it is for a file, and a file's name ends in .gguf; leave it out" in said
    assert not out.exists()


def test_a_file_stores_half_precision_unless_told_otherwise(model: Model, tmp_path: Path) -> None:
    wakeful.export(model, tmp_path / "usual.gguf")
    for storage in ("f16", "f32"):
        wakeful.export(model, tmp_path / f"{storage}.gguf", gguf=storage)
    usual, half, whole = (
        (tmp_path / f"{name}.gguf").stat().st_size for name in ("usual", "f16", "f32")
    )
    assert usual == half < whole


def test_a_file_is_written_below_folders_that_are_not_there_yet(
    model: Model, tmp_path: Path
) -> None:
    path = tmp_path / "a/b/m.gguf"
    assert wakeful.export(model, path) == "llama"
    assert gguf.GGUFReader(path).tensors
    (tmp_path / "file").touch()
    with pytest.raises(WakefulError, match="cannot be written"):
        wakeful.export(model, tmp_path / "file/m.gguf")


def test_a_step_of_what_is_no_run_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(WakefulError, match="step = 5: llama is not a run directory"):
        wakeful.export(folder, tmp_path / "out", step=5)
    # Nothing is fetched first.
    with pytest.raises(WakefulError, match="step = 5: some/model is not a run directory"):
        wakeful.export("some/model", tmp_path / "out", step=5)
    assert not (tmp_path / "out").exists()


def test_settings_that_transformers_warns_of_go_along(folder: Path, tmp_path: Path) -> None:
    """As Vicuna's: a temperature is named, and sampling is not turned on."""
    said = {"temperature": 0.6, "top_p": 0.9, "eos_token_id": [0, 7]}
    (folder / "generation_config.json").write_text(json.dumps(said))
    wakeful.export(folder, tmp_path / "out")
    table = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert {name: table.get(name) for name in said} == said
    (folder / "generation_config.json").write_text('{"max_new_tokens": -1}')
    with pytest.raises(
        WakefulError, match=r"^generation_config\.json is damaged: .*max_new_tokens"
    ):
        wakeful.export(folder, tmp_path / "next")
    assert not (tmp_path / "next").exists()


@pytest.mark.parametrize("ends", [[0, 7], 7])
def test_the_ends_of_a_configuration_alone_go_along(
    ends: int | list[int], folder: Path, tmp_path: Path
) -> None:
    table = json.loads((folder / "config.json").read_text()) | {"eos_token_id": ends}
    (folder / "config.json").write_text(json.dumps(table))
    (folder / "generation_config.json").unlink()
    wakeful.export(folder, tmp_path / "out")
    wakeful.export(wakeful.load(folder), tmp_path / "loaded")  # by Transformers' tokenizer
    for name in ("out", "loaded"):
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / name)
        assert stock.generation_config.eos_token_id == ends, name
    both = {0, 7}
    assert read_decoder(folder).ends == wakeful.load(tmp_path / "out").ends == both


@since("5.16", "it reads vocab.json and merges.txt of a GPT-2")
def test_settings_go_along_with_a_tokenizer_that_is_in_older_files(tmp_path: Path) -> None:
    theirs = GPT2Config(vocab_size=258, n_embd=16, n_layer=2, n_head=2, n_positions=32)
    AutoModelForCausalLM.from_config(theirs).save_pretrained(tmp_path / "gpt2")
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = {name: number for number, name in enumerate([*letters, "<|endoftext|>"])}
    (tmp_path / "gpt2/vocab.json").write_text(json.dumps(names))
    (tmp_path / "gpt2/merges.txt").write_text("#version: 0.2\n")
    (tmp_path / "gpt2/generation_config.json").write_text('{"eos_token_id": [256, 9]}')
    assert read_decoder(tmp_path / "gpt2").ends == {256, 9}
    wakeful.export(tmp_path / "gpt2", tmp_path / "out")
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert stock.generation_config.eos_token_id == [256, 9]


@pytest.mark.parametrize(
    ("kind", "given", "key"),
    [
        ("llama", {"rope_theta": 500000}, "llama.rope.freq_base"),
        ("gemma2", GEMMA2 | {"logit_cap": 30}, "gemma2.final_logit_softcapping"),
    ],
)
def test_whole_numbers_are_exported_as_what_their_fields_hold(
    kind: str, given: dict[str, object], key: str, model: Model, tmp_path: Path
) -> None:
    tokenizer = model.wakeful_tokenizer
    made = decoder(tokenizer.vocab_size, **given)
    assert export_gguf(made, tmp_path / "m.gguf", tokenizer=tokenizer) == kind
    assert gguf.GGUFReader(tmp_path / "m.gguf").fields[key].types == [gguf.GGUFValueType.FLOAT32]
    assert export_decoder(made, tmp_path / "folder", tokenizer=tokenizer) == kind
    assert wakeful.load(tmp_path / "folder").decoder().config.rope_theta == made.config.rope_theta


@pytest.mark.parametrize("scheme", ["fine", "kv8"])
def test_a_quantized_model_in_memory_is_refused(scheme: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(TEXTS, vocab_size=270)
    small = quantize_module(decoder(tokenizer.vocab_size), scheme)
    for out in ("out", "out.gguf"):
        with pytest.raises(WakefulError, match="is quantized: export the model it was made from"):
            wakeful.export(small, tmp_path / out)
    with pytest.raises(WakefulError, match="is quantized: cure the model it was made from"):
        wakeful.cure(small, rotate="hadamard", tokenizer=tokenizer)
    assert not list(tmp_path.iterdir())
