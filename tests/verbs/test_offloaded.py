"""Models that accelerate has offloaded or spread over devices: every verb reads their weights."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from accelerate.utils import compute_module_sizes
from test_in_memory import VERBS, Verb, diagnosed, llama, quantized, tokenizer
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaForCausalLM, pipeline

import wakeful
from devices import GPU, OnGpu, stand_in_gpu
from helpers import EXAMPLES, FIELD, some_tokens, tiny_decoder
from training.runs import text
from wakeful import paged
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.modeling import WakefulForCausalLM, as_transformers
from wakeful.hf.weights_out import export_decoder
from wakeful.loading import resident
from wakeful.quantization import layerwise

__all__ = ["text"]
CPU = torch.device("cpu")
TOKENS = torch.arange(12)[None]


def on_cpu(model: Any, folder: Path) -> nn.Module:
    return cpu_offload(model, CPU)


def on_disk(model: Any, folder: Path) -> nn.Module:
    return disk_offload(model, str(folder / "offloaded"), CPU)


PLACES = {
    "model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk",
    "model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "disk",
}  # fmt: skip


def dispatched(model: Any, folder: Path) -> nn.Module:
    return dispatch_model(model, PLACES, offload_dir=str(folder / "offloaded"))


def loaded(model: Any, folder: Path) -> nn.Module:
    model.save_pretrained(folder / "saved")
    return type(model).from_pretrained(
        folder / "saved", offload_folder=str(folder / "offloaded"), device_map=PLACES
    )


def tied() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = llama().config
    config.tie_word_embeddings = True
    return LlamaForCausalLM(config).eval()


def own() -> WakefulForCausalLM:
    return as_transformers(tiny_decoder(dtype=torch.float32, vocab_size=258, max_length=64).eval())


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_does_with_an_offloaded_model_what_it_does_with_the_model(
    verb: Verb, text: Path, tmp_path: Path
) -> None:
    expected = verb(llama(), tokenizer(), text, tmp_path / "whole")
    module = dispatched(llama(), tmp_path)
    assert next(module.model.layers[1].parameters()).is_meta
    assert verb(module, tokenizer(), text, tmp_path / "spread") == expected
    assert next(module.model.layers[1].parameters()).is_meta  # the user's is as it was
    torch.testing.assert_close(module(TOKENS).logits, llama()(TOKENS).logits)


@pytest.mark.parametrize("make", [llama, tied, own])
@pytest.mark.parametrize("offload", [on_cpu, on_disk, loaded])
def test_however_a_model_is_offloaded_it_is_the_same_model(
    make: Callable[[], Any], offload: Callable[..., nn.Module], text: Path, tmp_path: Path
) -> None:
    if make is own and offload is loaded:
        pytest.skip("its modules have other names")
    model = wakeful.load(make(), tokenizer=tokenizer())
    expected, said = model.logits(TOKENS), model.generate("def ", num_tokens=8)
    found = wakeful.load(offload(make(), tmp_path), tokenizer=tokenizer())
    torch.testing.assert_close(found.logits(TOKENS), expected, rtol=0, atol=0)
    assert found.generate("def ", num_tokens=8) == said
    assert found.decoder().config == model.decoder().config
    count = sum(each.numel() for each in model.module.parameters())
    assert sum(each.numel() for each in found.module.parameters()) == count
    converted = wakeful.load(found, max_length=16)
    assert converted.module is found.module


@pytest.mark.slow
def test_what_is_offloaded_to_memory_is_shared_and_what_does_not_fit_stays_in_files(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = llama()
    places = {each.data_ptr() for each in module.parameters()}
    found = wakeful.load(cpu_offload(module, CPU), tokenizer=tokenizer()).module
    assert {each.data_ptr() for each in found.parameters()} == places
    monkeypatch.setattr(resident, "free_memory", lambda _: 1000)
    found = wakeful.load(on_disk(llama(), tmp_path), tokenizer=tokenizer())
    matrices = [each for each in found.module.parameters() if each.ndim > 1]
    assert all(isinstance(each, paged.Paged) for each in matrices)
    torch.testing.assert_close(found.logits(TOKENS), llama()(TOKENS).logits)
    assert quantized(found, None, text, tmp_path)


def test_a_model_without_values_and_what_is_no_model_are_refused_in_a_line() -> None:
    with torch.device("meta"):
        empty = llama()
    with pytest.raises(WakefulError, match=r"no values of its weight model\.embed_tokens\.weight"):
        wakeful.load(empty, tokenizer=tokenizer())
    pipe = pipeline("text-generation", llama(), tokenizer=tokenizer(), device="cpu")
    asked = {wakeful.cure: {"rotate": "hadamard"}}
    for verb in (wakeful.diagnose, wakeful.cure, wakeful.quantize, wakeful.evaluate):
        with pytest.raises(WakefulError, match=r"a TextGenerationPipeline is not a model.*\.model"):
            verb(pipe, **asked.get(verb, {}))
    with pytest.raises(WakefulError, match="model is a dict: give a path"):
        wakeful.export({}, "out")
    with pytest.raises(WakefulError, match="model is a NoneType: give a path"):
        wakeful.generate(None, "def ")


# ----------------------------------------------------------------------------- our own class


@pytest.mark.slow
@pytest.mark.parametrize(
    "over",
    [{FIELD[folder]: expression} for folder, expression in EXAMPLES]
    + [{"positions": "learned"}, {"stored_prefix": 2}],
    ids=str,
)
@torch.no_grad()
def test_our_class_runs_offloaded_with_its_cache(over: dict[str, Any]) -> None:
    tokens = some_tokens(2, 9)
    decoder = tiny_decoder(dtype=torch.float32, **over).eval()
    whole, offloaded = as_transformers(decoder), cpu_offload(as_transformers(decoder), CPU)
    torch.testing.assert_close(offloaded(tokens).logits, whole(tokens).logits, rtol=0, atol=0)
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(offloaded.generate(tokens, **how), whole.generate(tokens, **how))
    assert all(each.is_meta for each in offloaded.parameters())


@pytest.mark.parametrize(
    "over", [{}, {"route": "svformer"}, {"stored_prefix": 2}, {"route": "cla"}], ids=str
)
@torch.no_grad()
def test_an_exported_folder_is_loaded_by_accelerate(over: dict[str, Any], tmp_path: Path) -> None:
    """Its device map splits between blocks, and what is loaded by it gives the same logits."""
    decoder = tiny_decoder(dtype=torch.float32, vocab_size=258, num_layers=4, **over).eval()
    folder = tmp_path / "exported"
    export_decoder(decoder, folder, tokenizer=Tokenizer.train(["a b c"], 258))
    trusted = {"trust_remote_code": True}
    expected = AutoModelForCausalLM.from_pretrained(folder, **trusted)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder, **trusted))
    room = int(0.6 * compute_module_sizes(model)[""])
    places = infer_auto_device_map(
        model, max_memory={"cpu": room}, no_split_module_classes=[*model._no_split_modules]
    )
    assert set(places.values()) == {"cpu", "disk"}
    loaded = load_checkpoint_and_dispatch(
        model, str(folder), device_map=places, offload_folder=str(tmp_path / "offloaded")
    ).eval()
    assert any(each.is_meta for each in loaded.parameters())
    tokens = some_tokens(2, 9)
    torch.testing.assert_close(loaded(tokens).logits, expected(tokens).logits, rtol=0, atol=0)
    how = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(loaded.generate(tokens, **how), expected.generate(tokens, **how))


@pytest.fixture
def spread(as_users_run_it: None) -> Iterator[None]:
    with stand_in_gpu():
        yield


def spread_over_two(model: Any, blocks: Any, *last: nn.Module) -> Any:
    """Put the second half of a model onto the stand-in for a GPU, as accelerate does."""
    add_hook_to_module(model, AlignDevicesHook(io_same_device=True))
    for part in (*blocks[len(blocks) // 2 :], *last):
        part.to(GPU)
        hook = AlignDevicesHook(io_same_device=False)
        hook.execution_device = GPU  # what it would move itself, past the stand-in's eyes
        add_hook_to_module(part, hook)
    return model


@pytest.mark.parametrize(
    "over", [{}, {"route": "svformer"}, {"route": "resformer"}, {"stored_prefix": 2}], ids=str
)
@torch.no_grad()
def test_our_class_runs_with_blocks_on_two_devices(spread: None, over: dict[str, Any]) -> None:
    tokens = some_tokens(2, 9)
    model = as_transformers(tiny_decoder(dtype=torch.float32, **over).eval())
    assert model._no_split_modules == {"Block"}
    expected, more = model(tokens).logits, model(some_tokens(2, 12)).logits
    decoder = model.model.decoder
    spread_over_two(model, decoder.blocks, decoder.norm, model.lm_head)
    assert isinstance(model.lm_head.weight, OnGpu)
    torch.testing.assert_close(model(tokens).logits.cpu(), expected)
    cache = model.new_cache(2)
    first = model(some_tokens(2, 12)[:, :7], past_key_values=cache).logits.cpu()
    rest = model(some_tokens(2, 12)[:, 7:], past_key_values=cache).logits.cpu()
    torch.testing.assert_close(torch.cat([first, rest], 1), more)


def test_a_model_whose_blocks_share_weights_is_not_split() -> None:
    for over in ({"route": 'resformer(mode="learnable")'}, {"depth": "mudd"}):
        assert as_transformers(tiny_decoder(**over))._no_split_modules == {"Decoder"}


def quantized_by_blocks(module: Any, words: Any, text: Path, out: Path) -> Any:
    """Quantize some layers, each block after the one before."""
    found = wakeful.quantize(
        module, "scheme(weights=absmax(bits=4, per='channel', group=8), method=gptq)",
        text=str(text), tokenizer=words, calibration_sequences=1, length=8, num_sequences=1,
        skip=("*.mlp.*", "*.q_proj", "*.k_proj", "lm_head"), device="cpu",
    )  # fmt: skip
    return found.frame.to_dicts()


@pytest.mark.slow
@pytest.mark.parametrize("verb", [diagnosed, quantized_by_blocks])
def test_a_spread_model_is_diagnosed_and_quantized_where_it_lies(
    spread: None, verb: Verb, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layerwise, "PRODUCTS", 1)
    expected = verb(llama(), tokenizer(), text, tmp_path)
    module = llama()
    spread_over_two(module, module.model.layers, module.model.norm, module.lm_head)
    found = verb(module, tokenizer(), text, tmp_path)
    if verb is diagnosed:
        assert found == expected
        return
    for one, other in zip(found, expected, strict=True):
        for name, value in one.items():
            near = name in ("value", "standard_error") and value is not None
            assert value == (pytest.approx(other[name], 1e-3) if near else other[name])
