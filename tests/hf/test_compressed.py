"""Quantized models as compressed-tensors: what is written, and what stock Transformers reads."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from helpers import tiny_decoder
from wakeful.errors import WakefulError
from wakeful.hf.compressed import check_compressed, packed, save_compressed
from wakeful.hf.quantized import load_quantized, save_quantized
from wakeful.hf.weights_in import decoder_of
from wakeful.probes.running import logits_of
from wakeful.quant import parse_scheme, quantize, quantized_layers
from wakeful.quant.convert import linear_layers
from wakeful.quant.norm_readers import readers_of_norms
from wakeful.quant.schemes import Absmax, Scales

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "initializer_range": 0.3,
}  # fmt: skip
TOKENS = torch.arange(40).view(2, 20) * 7 % 61
TEXT = [(torch.arange(30)[None] * n + n) % 61 for n in (3, 5, 11)]
EXACT = [
    "scheme(weights=absmax(bits=4, per='channel', group=16))",
    "w4a16(weights=absmax(bits=4, per='channel'))",
    "w4a16(weights=absmax(bits=4, per='channel', group=32), method=gptq)",
    "scheme(weights=absmax(bits=8, per='channel'))",
    "fp8",
    "fp8(method=smooth(norms=True))",
]
"""What both compute alike to rounding."""
CLOSE = [
    "w8a8", "fine(method=smooth(norms=True))", "moderate(scales='static')",
    "moderate(scales='static', method=smooth(norms=True))",
]  # fmt: skip
"""Whose int8 inputs are rounded there from −128 to 127, here from −127 to 127."""


class Theirs(Absmax):
    """Inputs as compressed-tensors rounds them."""

    @property
    def low(self) -> float:
        return -128

    def fit(self, smallest: Tensor, largest: Tensor) -> Scales:
        return Scales(torch.maximum(smallest.abs(), largest.abs()) / 127.5)


def llama(**over: object) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES | over)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def qwen() -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)).eval()


def small(model: nn.Module, scheme: str) -> nn.Module:
    found = parse_scheme(scheme)
    return quantize(model, found, calibration=TEXT if found.calibrated else ())


def saved(model: nn.Module, folder: Path) -> PreTrainedModel:
    pytest.importorskip("compressed_tensors")
    save_compressed(model, folder, lambda _: None)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.inference_mode()
def logits(model: nn.Module) -> Tensor:
    return torch.cat([logits_of(model, row[None]) for row in TOKENS])


@pytest.mark.parametrize("make", [llama, qwen])
@pytest.mark.parametrize("scheme", EXACT)
def test_stock_transformers_reads_the_same_model(
    make: Callable[[], PreTrainedModel], scheme: str, tmp_path: Path
) -> None:
    model = make()
    ours = small(model, scheme)
    theirs = saved(ours, tmp_path / "small")
    assert type(theirs) is type(model)
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(theirs), logits(model), atol=1e-3)


@pytest.mark.parametrize("ours", [False, True])
def test_a_norm_that_is_stored_less_one_is_divided_whole(ours: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=64, pad_token_id=0)
    gemma = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in gemma.named_parameters():
            if "norm" in name:
                parameter.uniform_(-0.5, 0.5)
    model = decoder_of(gemma) if ours else gemma
    quantized = small(model, "fp8(method=smooth(norms=True))")
    theirs = saved(quantized, tmp_path / "small")
    assert isinstance(theirs, Gemma3ForCausalLM)
    torch.testing.assert_close(logits(theirs), logits(quantized), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(logits(theirs), logits(gemma), atol=1e-2)


@pytest.mark.parametrize("scheme", CLOSE)
def test_int8_inputs_are_rounded_to_one_more_number(scheme: str, tmp_path: Path) -> None:
    model = llama()
    ours = small(model, scheme)
    theirs = saved(ours, tmp_path / "small")
    whole, found = logits(model), logits(theirs)
    assert (found - logits(ours)).norm() < 0.08 * whole.norm()
    kept = quantized_layers(ours)
    for name, module in theirs.named_modules():  # the first forward unpacked them
        if name in kept:
            assert isinstance(module, nn.Linear)
            torch.testing.assert_close(module.weight, kept[name].dequantized())
    # With their rounding of inputs both are one function, but for what tips over: the largest |x|
    # of a token lies at 127.5, half-way between two numbers.
    for layer in kept.values():
        inputs = layer.scheme.inputs
        if layer.scheme.scales == "dynamic" and inputs is not None:
            layer.scheme = copy.copy(layer.scheme)
            layer.scheme.inputs = Theirs(bits=8, per=inputs.per)
    assert (found - logits(ours)).norm() < 0.02 * whole.norm()


@pytest.mark.parametrize(
    "scheme", ["w4a16(weights=absmax(bits=4, per='channel'))", "fp8(method=smooth(norms=True))"]
)
@pytest.mark.parametrize("tied", [True, False])
def test_our_decoder_becomes_the_stock_architecture(
    scheme: str, tied: bool, tmp_path: Path
) -> None:
    decoder = decoder_of(llama(tie_word_embeddings=tied, attention_bias=True))
    ours = small(decoder, scheme)
    theirs = saved(ours, tmp_path / "small")
    assert isinstance(theirs, LlamaForCausalLM)
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-4, atol=1e-4)
    table = json.loads((tmp_path / "small" / "config.json").read_text("utf-8"))
    assert table["quantization_config"]["ignore"] == (["lm_head"] if tied else [])


def test_bfloat16_and_layers_left_as_they_are(tmp_path: Path) -> None:
    model = llama().bfloat16()
    ours = quantize(model, "scheme(weights=absmax(bits=8, per='channel'))", skip=["*.o_proj"])
    theirs = saved(ours, tmp_path / "small")
    assert theirs.dtype == torch.bfloat16
    apart = (logits(theirs) - logits(ours)).float().norm()
    assert apart < 0.02 * logits(model).float().norm()
    output = theirs.get_parameter("model.layers.0.self_attn.o_proj.weight")
    assert torch.equal(output, model.get_parameter("model.layers.0.self_attn.o_proj.weight"))


def test_numbers_are_packed_as_the_package_packs_them() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    for bits in (4, 8):
        half = 2 ** (bits - 1)
        codes = torch.randint(-half, half, (5, 13), dtype=torch.int8)
        assert torch.equal(packed(codes, bits), helpers.pack_to_int32(codes, bits))
        assert torch.equal(helpers.unpack_from_int32(packed(codes, bits), bits, codes.shape), codes)


def test_packed_words() -> None:
    codes = torch.tensor([[-8, -7, 0, 7, 1, 2, 3, 7, -8]], dtype=torch.int8)
    first = sum((int(code) + 8) << 4 * n for n, code in enumerate(codes[0, :8])) - 2**32
    assert packed(codes, 4).tolist() == [[first, 0]]
    assert packed(codes, 8).shape == (1, 3)
    assert packed(codes, 4).dtype == torch.int32


def test_which_layers_read_which_norm() -> None:
    found = readers_of_norms(llama())
    assert found["model.layers.1.input_layernorm"] == [
        f"model.layers.1.self_attn.{name}_proj" for name in "qkv"
    ]
    assert sum(map(len, found.values())) == 2 * 5  # Transformers cuts what the head reads
    found = readers_of_norms(decoder_of(llama()))
    assert found["blocks.0.mlp_norm"] == ["blocks.0.mlp.gate", "blocks.0.mlp.up"]
    assert found["norm"] == ["head"]


def test_smoothing_only_after_norms() -> None:
    model = llama()
    layers = quantized_layers(small(model, "fine(method=smooth(norms=True))"))
    read = {name for names in readers_of_norms(model).values() for name in names}
    for name, layer in layers.items():
        assert layer.divisor is not None
        assert bool((layer.divisor == 1).all()) == (name not in read), name
    assert set(layers) == set(linear_layers(model))


def test_what_the_format_lacks_is_refused(tmp_path: Path) -> None:
    def fails(message: str, model: nn.Module, scheme: str) -> None:
        """Before anything is quantized, and of the quantized model."""
        parsed = parse_scheme(scheme)
        layers = linear_layers(model) if parsed.weights is not None else {}
        with pytest.raises(WakefulError, match=message):
            check_compressed(model, parsed, layers)
        with pytest.raises(WakefulError, match=message):
            save_compressed(small(model, scheme), tmp_path / "no", lambda _: None)
        assert not list(tmp_path.iterdir())

    model = llama()
    fails("stores only schemes of weights and inputs", model, "coarse")
    fails("not of outputs or the KV cache; use --scheme w8a8 or w4a16, or", model, "kv8")
    fails("both 8-bit absmax or both fp8", model, "nvfp4")
    fails(
        "weight-only schemes of 4 or 8 bits", model, "scheme(weights=absmax(bits=6, per='channel'))"
    )
    fails("per-tensor input scales that are static", model, "moderate")
    fails(
        "dynamic input scales without clipping",
        model,
        "w8a8(inputs=absmax(bits=8, per='token', clip=0.9))",
    )
    grid = "w4a16(weights=absmax(bits=4, per='channel', group=24))"
    fails(r"whole groups of 24, .*group=16.*, or --save_as wakeful", model, grid)
    fails(r"smooth\(norms=True\)", model, "fine(method=smooth)")
    fails(r"weights without a zero point.* use --scheme .*absmax\(bits=4", model, "w4")
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2)).eval()
    fails("is an nn.Linear in Transformers", gpt2, "fine")
    fails("holds several of ours", decoder_of(gpt2), "fine")
    fails(
        r"of our own class: .*--rotate hadamard alone",
        tiny_decoder(dtype=torch.float32, route="resformer"),
        "fine",
    )
    part = quantize(model, "fine(method=smooth(norms=True))", calibration=TEXT, skip=["*.q_proj"])
    smooth, some = parse_scheme("fine(method=smooth(norms=True))"), ["*.q_proj"]
    with pytest.raises(WakefulError, match="read one norm and divide it differently"):
        check_compressed(model, smooth, linear_layers(model, some))
    with pytest.raises(WakefulError, match="read one norm and divide it differently"):
        save_compressed(part, tmp_path / "no", lambda _: None)
    (tmp_path / "there").mkdir()
    with pytest.raises(WakefulError, match="exists already"):
        save_compressed(small(model, "fine"), tmp_path / "there", lambda _: None)


def test_buffers_that_belong_to_the_weights_are_written(tmp_path: Path) -> None:
    model = DeepseekV3ForCausalLM(
        DeepseekV3Config(
            vocab_size=61, hidden_size=32, intermediate_size=64, moe_intermediate_size=16,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, n_routed_experts=4,
            num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1,
            kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8,
        )
    ).eval()  # fmt: skip
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    with torch.no_grad():
        model.get_buffer(name).copy_(torch.tensor([5.0, 0.0, 0.0, -5.0]))
    part = quantize(model, "fine", skip=["*.mlp.experts", "*.mlp.gate"])
    save_compressed(part, tmp_path / "small", lambda _: None)
    stored = load_file(tmp_path / "small" / "model.safetensors")
    assert torch.equal(stored[name], model.get_buffer(name))


@torch.no_grad()
@pytest.mark.parametrize("skip", [(), ("lm_head",)])
@pytest.mark.parametrize("own", [False, True])
def test_a_head_that_was_untied_in_memory_is_written(
    own: bool, skip: tuple[str, ...], tmp_path: Path
) -> None:
    model = llama(tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))  # pyright: ignore
    assert model.config.tie_word_embeddings
    ours = quantize(model, EXACT[3], skip=skip)
    if own:
        (tmp_path / "small").mkdir()
        save_quantized(ours, tmp_path / "small", name="it", context=64, bos=None)
        theirs = load_quantized(tmp_path / "small", device=torch.device("cpu"))[0]
    else:
        theirs = saved(ours, tmp_path / "small")
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-4, atol=1e-4)
