"""Keys and values of Transformers' models on a grid: read, watched, saved and refused."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_convert import gpt2, llama
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
)

from wakeful.errors import WakefulError
from wakeful.hf.cache import CACHE
from wakeful.hf.weights_in import convert_hf_model
from wakeful.loading.load import load
from wakeful.probes.base import AttentionEvent, Event, Probe
from wakeful.probes.experts import is_fused
from wakeful.probes.running import logits_of
from wakeful.probes.watch import watch
from wakeful.quantization import parse_scheme, quantize_module
from wakeful.quantization.cache import QuantizedCache
from wakeful.quantization.compressed import save_compressed

CALIBRATED = [
    "scheme(cache=absmax(bits=8, per='tensor'))",
    "scheme(cache=zeropoint(bits=4, per='tensor'))",
    "scheme(cache=e4m3(per='tensor'))",
    "scheme(cache=absmax(bits=4, per='head'))",
    "scheme(cache=zeropoint(bits=4, per='head'))",
]
"""Caches with scales of calibration text."""
BLOCKS = [
    "scheme(cache=absmax(bits=4, per='token', group=2))",
    "scheme(cache=mx_e2m1(per='token'))",
]
TEXT = [torch.randint(29, (1, 16), generator=torch.Generator().manual_seed(n)) for n in range(2)]
TOKENS = torch.arange(18).view(2, 9) * 3 % 29
CPU = torch.device("cpu")


def logits(model: torch.nn.Module, tokens: Tensor = TOKENS) -> Tensor:
    with torch.inference_mode():
        return logits_of(model, tokens)


@pytest.mark.parametrize(
    "scheme", ["kv8", "kv4", "scheme(cache=zeropoint(bits=4, per='token'))", *CALIBRATED, *BLOCKS]
)
@pytest.mark.parametrize("make", [llama, gpt2])
def test_the_same_numbers_as_in_our_decoder(
    make: Callable[[], PreTrainedModel], scheme: str
) -> None:
    model = make()
    before = logits(model)
    text = TEXT if scheme in CALIBRATED else []
    small = quantize_module(model, scheme, calibration=text)
    with torch.inference_mode():
        expected = quantize_module(convert_hf_model(model), scheme, calibration=text)(TOKENS)
    torch.testing.assert_close(logits(small), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, before, atol=1e-4)
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(logits(model), before)
    assert small.get_parameter("lm_head.weight") is model.get_parameter("lm_head.weight")


@pytest.mark.parametrize("scheme", CALIBRATED)
def test_scales_come_from_the_range_of_calibration_text(scheme: str) -> None:
    grid = parse_scheme(scheme).cache
    assert grid is not None
    cache = QuantizedCache(parse_scheme(scheme))
    model = torch.nn.ModuleList([cache])
    sizes = torch.tensor([1.0, 30.0])[:, None]  # of the two heads
    text, heads = torch.randn(3, 1, 5, 2, 8) * sizes, torch.randn(2, 7, 2, 8) * sizes
    cache.calibrating = True
    for keys in text:
        assert torch.equal(cache(keys, "keys"), keys)
    cache.calibrating = False
    rounded = model.bfloat16()[0](heads, "keys")
    for head in range(2):
        part = text[..., head, :] if grid.per == "head" else text
        scales = grid.fit_scales(part.min(), part.max())
        expected = grid.fake_quantize(heads[..., head, :], scales)
        torch.testing.assert_close(rounded[..., head, :], expected, rtol=0, atol=0)


def test_a_scale_of_a_growing_cache_needs_text() -> None:
    with pytest.raises(WakefulError, match="scales need calibration text"):
        quantize_module(llama(), "scheme(cache=absmax(bits=8, per='tensor'))")


def test_eager_attention_and_a_mask() -> None:
    model = llama()
    small = quantize_module(model, "kv4")
    model.set_attn_implementation("eager")
    eager = quantize_module(model, "kv4")
    mask = torch.ones_like(TOKENS)
    mask[0, :4] = 0
    with torch.inference_mode():
        one, other = (each(input_ids=TOKENS, attention_mask=mask).logits for each in (small, eager))
    torch.testing.assert_close(one[0, 4:], other[0, 4:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(one[1], logits(small)[1], rtol=1e-4, atol=1e-5)


def test_reading_token_by_token_is_reading_at_once() -> None:
    small = quantize_module(llama(), "kv4")
    past, parts = None, []
    with torch.inference_mode():
        for n in range(9):
            output = small(input_ids=TOKENS[:, n : n + 1], **{CACHE: past}, use_cache=True)
            past = output.get(CACHE)
            parts.append(output.logits)
    torch.testing.assert_close(torch.cat(parts, 1), logits(small), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("implementation", ["sdpa", "eager", "wakeful_softmax1"])
def test_probes_see_what_attention_reads(implementation: str) -> None:
    class Recorder(Probe):
        keys: list[Tensor]

        def see(self, event: Event) -> None:
            if isinstance(event, AttentionEvent):
                self.keys.append(event.k.clone())

        def rows(self):
            raise NotImplementedError

    model, seen = llama(), []
    model.set_attn_implementation(implementation)
    for each in (model, quantize_module(model, "kv4")):
        probe = Recorder()
        probe.keys = []
        with watch(each, probe):
            logits(each)
        seen.append(probe.keys[0])
    plain, rounded = seen
    grid = parse_scheme("kv4").cache
    assert grid is not None
    assert rounded.shape == plain.shape
    rows = plain.reshape(-1, plain.shape[-1])
    expected = grid.fake_quantize(rows, grid.compute_scales(rows)).view_as(plain)
    torch.testing.assert_close(rounded, expected)


@pytest.mark.parametrize("make", [llama, lambda: convert_hf_model(llama())])
@pytest.mark.parametrize(
    "scheme", ["kv8", "fine(cache=absmax(bits=4, per='token'))", CALIBRATED[1]]
)
def test_a_model_that_has_it_is_quantized_already(scheme: str, make: Callable) -> None:
    small = quantize_module(make(), scheme, calibration=TEXT if scheme in CALIBRATED else ())
    with pytest.raises(WakefulError, match="quantized already"):
        quantize_module(small, "fine")


@pytest.mark.parametrize("scheme", ["fine", "kv4"])
def test_softmax1_stays_where_a_model_attends_by_it(scheme: str, tmp_path: Path) -> None:
    model = llama()
    plain = logits(quantize_module(model, scheme))
    model.set_attn_implementation("wakeful_softmax1")
    small = quantize_module(model, scheme)
    with torch.inference_mode():
        expected = quantize_module(convert_hf_model(model), scheme)(TOKENS)
    torch.testing.assert_close(logits(small), expected, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(expected, plain, atol=1e-3)
    if scheme == "fine":
        with pytest.raises(WakefulError, match="no place for softmax-1, by which this Llama"):
            save_compressed(small, tmp_path / "no", lambda _: None)


def test_its_decoder_would_read_other_keys_and_values() -> None:
    small = quantize_module(llama(), "kv4")
    for each in (small, quantize_module(llama(), "fine")):
        with pytest.raises(WakefulError, match="take the model before it was quantized"):
            convert_hf_model(each)
    loaded = load(small, tokenizer=None)
    prompt = [1, 2, 3]
    with torch.inference_mode():
        wanted = small.generate(torch.tensor([prompt]), max_new_tokens=9, do_sample=False)
    continued = loaded.generate_ids(prompt, num_tokens=9, temperature=0.0)
    assert [[*prompt, *continued]] == wanted.tolist()


def test_a_scheme_of_the_cache_leaves_experts_as_they_are() -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=29, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, num_local_experts=2, initializer_range=0.3,
    )  # fmt: skip
    model = MixtralForCausalLM(config).eval()
    small = quantize_module(model, "kv4")
    assert any(is_fused(module) for module in small.modules())
    assert not torch.allclose(logits(small), logits(model), atol=1e-4)
    with pytest.raises(WakefulError, match="kv4 quantizes no layer"):
        quantize_module(model, "kv4", skip=["lm_head"])
    with pytest.raises(
        WakefulError, match=r"quantized already: model.layers.0.*quantized_cache is kv4"
    ):
        quantize_module(small, "kv8")


def test_models_out_of_reach_are_refused() -> None:
    torch.manual_seed(0)
    bloom = BloomForCausalLM(BloomConfig(vocab_size=29, hidden_size=16, n_layer=1, n_head=2)).eval()
    with pytest.raises(WakefulError, match="bypasses Transformers' AttentionInterface"):
        quantize_module(bloom, "kv8")
    narrow = DeepseekV3Config(
        vocab_size=29, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        first_k_dense_replace=1, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=8,
        kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=4,
    )  # fmt: skip
    with pytest.raises(WakefulError, match="keys 8 and values 4 wide"):
        quantize_module(DeepseekV3ForCausalLM(narrow).eval(), "kv8")
    flexible = llama()
    flexible.config._attn_implementation = "flex_attention"
    with pytest.raises(WakefulError, match="has 'flex_attention'"):
        quantize_module(flexible, "kv8")
