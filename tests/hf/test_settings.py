"""What a model's files say besides its shape: how to generate, what to put out, which ids end."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, CTRLConfig, CTRLLMHeadModel

import wakeful
from evaluation.models import save_llama
from wakeful.errors import WakefulError
from wakeful.loading.load import _stock_tokenizer as stock_tokenizer
from wakeful.quantization import quantize_module

TOKENS = torch.arange(12)[None]
WATERMARK = {"greenlist_ratio": 0.25, "bias": 2.0, "hashing_key": 7, "seeding_scheme": "lefthash",
             "context_width": 1}  # fmt: skip


def folder_with(folder: Path, file: str, **fields: Any) -> Path:
    """Return a Llama's folder in one of whose files fields say something else."""
    save_llama(folder)
    table = json.loads((folder / file).read_text("utf-8"))
    (folder / file).write_text(json.dumps(table | fields), "utf-8")
    return folder


def read(folder: Path) -> Any:
    return wakeful.load(folder, device="cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [{"output_attentions": True}, {"return_dict": False}, {"output_hidden_states": True},
     {"torchscript": True}, {"use_cache": False}],
    ids=str,
)  # fmt: skip
def test_a_configuration_that_changes_outputs_changes_no_number(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    plain = read(save_llama(tmp_path / "plain"))
    folder = folder_with(tmp_path / "llama", "config.json", **fields)
    model = read(folder)
    torch.testing.assert_close(model.logits(TOKENS), plain.logits(TOKENS))
    assert model.generate("def ", num_tokens=6) == plain.generate("def ", num_tokens=6)
    torch.testing.assert_close(model.decoder()(TOKENS), plain.logits(TOKENS))
    assert wakeful.export(folder, tmp_path / "copy") == "llama"
    wakeful.quantize(folder, "w8a8", save=str(tmp_path / "small"))
    module = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    config = dict(vars(module.config))
    ours = wakeful.load(module, tokenizer=tmp_path / "plain")
    torch.testing.assert_close(ours.logits(TOKENS), plain.logits(TOKENS))
    assert ours.generate("def ", num_tokens=6) == plain.generate("def ", num_tokens=6)
    assert vars(module.config) == config  # the user's own stays as it is


def test_settings_of_generation_that_are_objects_are_written_as_they_were(tmp_path: Path) -> None:
    folder = folder_with(
        tmp_path / "llama", "generation_config.json", watermarking_config=WATERMARK,
        _from_model_config=False,
    )  # fmt: skip
    model = read(folder)
    assert model.generate("def ", num_tokens=4)
    assert model.wakeful_tokenizer.end == 256
    wakeful.export(folder, tmp_path / "copy")
    said = json.loads((tmp_path / "copy" / "generation_config.json").read_text("utf-8"))
    assert {name: said["watermarking_config"][name] for name in WATERMARK} == WATERMARK
    module = AutoModelForCausalLM.from_pretrained(folder)
    assert wakeful.load(module, tokenizer=folder).wakeful_tokenizer.end == 256


@pytest.mark.slow
@pytest.mark.parametrize("ends", [-1, [256, -5]])
def test_a_negative_end_is_no_token(ends: Any, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "llama", "generation_config.json", eos_token_id=ends)
    assert read(folder).ends == {256}
    wakeful.export(folder, tmp_path / "copy")
    copied = json.loads((tmp_path / "copy" / "config.json").read_text("utf-8"))
    assert copied["eos_token_id"] == 256
    AutoModelForCausalLM.from_pretrained(tmp_path / "copy")
    wakeful.export(folder, tmp_path / "llama.gguf")
    field = GGUFReader(tmp_path / "llama.gguf").get_field("tokenizer.ggml.eos_token_id")
    assert field is not None
    assert field.contents() == 256


@pytest.mark.parametrize(
    "ends", ["256", [256, "257"], "<eos>", 256.5, True, {"a": 1}, [[1]], 10**12]
)
def test_an_end_that_is_no_id_is_refused_in_a_line(ends: Any, tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "llama", "generation_config.json", eos_token_id=ends)
    for what in (
        lambda: wakeful.generate(folder, "def "),
        lambda: wakeful.export(folder, tmp_path / "copy"),
        lambda: wakeful.export(folder, tmp_path / "llama.gguf"),
    ):
        with pytest.raises(WakefulError, match=r"eos_token_id = .* must be a token id, a list of"):
            what()


@pytest.mark.parametrize(
    "fields",
    [{"compile_config": {"fullgraph": True}}, {"watermarking_config": {"ngram_len": 5}}],
    ids=str,
)
def test_settings_that_transformers_cannot_read_are_named(
    fields: dict[str, Any], tmp_path: Path
) -> None:
    folder = folder_with(tmp_path / "llama", "generation_config.json", **fields)
    with pytest.raises(WakefulError, match=r"^generation_config\.json is damaged: "):
        read(folder)


def test_a_model_that_scales_its_embeddings_in_place_is_quantized_by_gptq() -> None:
    torch.manual_seed(0)
    config = CTRLConfig(vocab_size=64, n_positions=32, n_embd=16, dff=24, n_layer=2, n_head=2)
    model = CTRLLMHeadModel(config).eval()
    scheme = "scheme(weights=absmax(bits=8, per='channel', group=8), method=gptq)"
    small = quantize_module(model, scheme, calibration=[TOKENS])
    expected = model(TOKENS).logits
    assert (small(TOKENS).logits - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize(
    ("fields", "setting"),
    [({"model_max_length": "big"}, "model_max_length"), ({"chat_template": 5}, "chat template")],
    ids=str,
)
def test_settings_of_a_tokenizer_that_are_no_such_thing_are_named(
    fields: dict[str, Any], setting: str, tmp_path: Path
) -> None:
    folder = folder_with(tmp_path / "llama", "tokenizer_config.json", **fields)
    with pytest.raises(WakefulError, match=rf"{setting}.* must") as refused:
        wakeful.export(folder, tmp_path / "llama.gguf")
    assert "tokenizer_config.json" in str(refused.value)


def test_settings_are_those_beside_a_tokenizer_without_one_file(tmp_path: Path) -> None:
    folder = tmp_path / "bert"
    folder.mkdir()
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\na\nb\n", "utf-8")
    settings = {"tokenizer_class": "BertTokenizer", "chat_template": "{{ messages }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), "utf-8")
    damaged = json.dumps(settings | {"chat_template": 5})
    (tmp_path / "tokenizer_config.json").write_text(damaged, "utf-8")  # of another model, above
    assert stock_tokenizer(folder).convert_tokens_to_ids(["a", "b"]) == [5, 6]
    (folder / "tokenizer_config.json").write_text(damaged, "utf-8")
    with pytest.raises(WakefulError, match=r"bert/tokenizer_config\.json: the chat template"):
        stock_tokenizer(folder)


def test_an_adapters_folder_names_its_base(tmp_path: Path) -> None:
    said = {"peft_type": "LORA", "base_model_name_or_path": "some/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(said), "utf-8")
    for verb in (wakeful.diagnose, wakeful.evaluate, wakeful.load):
        with pytest.raises(WakefulError, match=r"base model 'some/base': .*merge_and_unload\(\)"):
            verb(str(tmp_path))
    save_llama(tmp_path)  # beside a configuration too
    with pytest.raises(WakefulError, match="an adapter of peft without its base model 'some/base'"):
        wakeful.load(tmp_path)


def test_weights_that_may_not_be_read_are_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, opened = save_llama(tmp_path / "llama"), Path.open

    def refused(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.suffix == ".safetensors":
            raise PermissionError(13, "Permission denied", str(self))
        return opened(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(WakefulError, match=r"cannot read .*model\.safetensors: Permission denied"):
        wakeful.load(folder)
