"""Quantized models as compressed-tensors: what is written, and what stock Transformers reads."""

import copy
import json
import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
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
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from helpers import tiny_decoder
from quantization.test_experts import model_of
from wakeful.errors import WakefulError
from wakeful.hf.checkpoint_reader import load_hf_model
from wakeful.hf.transforms import attach_transforms, make_transform_config
from wakeful.hf.weights_in import convert_hf_model
from wakeful.probes.experts import put
from wakeful.probes.running import logits_of
from wakeful.quantization import compressed, parse_scheme, quantize_module, quantized_layers
from wakeful.quantization.compressed import check_compressed, compressed_config, save_compressed
from wakeful.quantization.convert import linear_layers, prepare_model
from wakeful.quantization.norm_readers import readers_of_norms, readers_of_tensors
from wakeful.quantization.schemes import Absmax, Scales
from wakeful.quantization.schemes.grids import MxE2M1
from wakeful.surgery.rotate import rotate

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
CACHES = [
    "scheme(cache=e4m3(per='tensor'))", "scheme(cache=absmax(bits=8, per='tensor'))",
    "scheme(weights=absmax(bits=4, per='channel', group=16), cache=e4m3(per='tensor'))",
    "scheme(cache=e4m3(per='head'))", "scheme(cache=absmax(bits=8, per='head'))",
]  # fmt: skip
"""Keys and values, whose scales are in the files."""
FLOATS = [
    "scheme(weights=mx_e2m1(per='channel'))", "scheme(weights=nv_e2m1(per='tensor'))",
    "mxfp4", "nvfp4(scales='static')",
]  # fmt: skip
"""4-bit floats, whose weights compressed-tensors unpacks to bfloat16."""
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

    def fit_scales(self, smallest: Tensor, largest: Tensor) -> Scales:
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
    return quantize_module(model, found, calibration=TEXT if found.calibrated else ())


def saved(model: nn.Module, folder: Path) -> PreTrainedModel:
    save_compressed(model, folder, lambda _: None)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@torch.inference_mode()
def logits(model: nn.Module) -> Tensor:
    return torch.cat([logits_of(model, row[None]) for row in TOKENS])


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_head_is_written_once(tied: bool, tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).eval()
    quantized = quantize_module(model, "w8a8", skip=["lm_head"])
    save_compressed(quantized, tmp_path / "small", lambda folder: None)
    names = load_file(tmp_path / "small" / "model.safetensors").keys()
    assert ("lm_head.weight" in names) is not tied
    assert compressed.state_bytes(quantized) <= compressed.file_bytes(tmp_path / "small")
    assert compressed.file_bytes(tmp_path / "small") < compressed.state_bytes(quantized) + 4000
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "small").eval()
    weights = again.lm_head.weight, again.model.embed_tokens.weight
    assert torch.equal(*weights) is tied
    assert torch.equal(weights[0], model.lm_head.weight)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("scheme", CACHES)
def test_scales_of_a_cache_are_written_and_read(scheme: str, ours: bool, tmp_path: Path) -> None:
    model = convert_hf_model(llama()) if ours else llama()
    quantized = small(model, scheme)
    save_compressed(quantized, tmp_path / "small", lambda _: None)
    expected = logits(quantized)
    theirs = load_hf_model(tmp_path / "small", dtype="auto")
    difference = (logits(theirs) - expected).abs()
    # A key midway between two steps of the cache rounds either way, as sums in float32 have another
    # order on another processor: then a few logits differ a little.
    assert (difference > 1e-4 * (1 + expected.abs())).double().mean() < 0.01
    assert difference.max() < 1e-3
    assert not torch.allclose(logits(model), expected, atol=1e-3)
    stored = load_file(tmp_path / "small" / "model.safetensors")
    names = [f"model.layers.{n}.self_attn.{part}_scale" for n in range(2) for part in "kv"]
    assert [name for name in stored if name.endswith(("k_scale", "v_scale"))] == sorted(names)
    shape, strategy = ((2, 1, 1), "attn_head") if "head" in scheme else ((1,), "tensor")
    assert all(stored[name].shape == shape for name in names)
    cache = theirs.config.quantization_config.quantization_config.kv_cache_scheme  # pyright: ignore
    assert (cache.num_bits, cache.strategy, cache.dynamic) == (8, strategy, False)


@pytest.mark.slow
def test_several_files_are_one_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = small(llama(), EXACT[0])
    expected = saved(ours, tmp_path / "one")
    monkeypatch.setattr(compressed, "write_tensors", partial(compressed.write_tensors, shard="9KB"))
    found = saved(ours, tmp_path / "several")
    assert len(list((tmp_path / "several").glob("model-*.safetensors"))) > 2
    assert torch.equal(logits(found), logits(expected))
    again = load_hf_model(tmp_path / "several", dtype="auto")
    assert torch.equal(logits(again), logits(expected))


@pytest.mark.slow
@pytest.mark.parametrize("ours", [False, True])
def test_a_norm_that_is_stored_less_one_is_divided_whole(ours: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=64, pad_token_id=0)
    gemma = Gemma3ForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in gemma.named_parameters():
            if "norm" in name:
                parameter.uniform_(-0.5, 0.5)
    model = convert_hf_model(gemma) if ours else gemma
    quantized = small(model, "fp8(method=smooth(norms=True))")
    theirs = saved(quantized, tmp_path / "small")
    assert isinstance(theirs, Gemma3ForCausalLM)
    torch.testing.assert_close(logits(theirs), logits(quantized), rtol=1e-3, atol=1e-3)
    assert not torch.allclose(logits(theirs), logits(gemma), atol=1e-2)


@pytest.mark.slow
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
            torch.testing.assert_close(module.weight, kept[name].dequantize())
    # With their rounding of inputs both are one function, but for what tips over: the largest |x|
    # of a token lies at 127.5, half-way between two numbers.
    for layer in kept.values():
        inputs = layer.scheme.inputs
        if layer.scheme.scales == "dynamic" and inputs is not None:
            layer.scheme = copy.copy(layer.scheme)
            layer.scheme.inputs = Theirs(bits=8, per=inputs.per)
    assert (found - logits(ours)).norm() < 0.02 * whole.norm()


@pytest.mark.slow
@pytest.mark.parametrize("scheme", FLOATS)
def test_four_bit_floats_are_read_by_stock_transformers(scheme: str, tmp_path: Path) -> None:
    ours = small(llama(), scheme)
    theirs = saved(ours, tmp_path / "small")
    assert theirs.dtype == torch.bfloat16
    found, plain = logits(theirs), llama()
    kept, inputs = quantized_layers(ours), parse_scheme(scheme).inputs
    exact = isinstance(parse_scheme(scheme).weights, MxE2M1)  # powers of two
    for name, layer in kept.items():  # the first forward unpacked them
        plain.get_submodule(name).weight.data = layer.dequantize()
        weight = theirs.get_submodule(name).weight.float()
        torch.testing.assert_close(
            weight, layer.dequantize(), rtol=0.0 if exact else 2.0**-8, atol=0.0
        )
    if inputs is None:
        exact_positions = plain.model.rotary_emb.inv_freq
        plain.to(torch.bfloat16).model.rotary_emb.inv_freq = exact_positions
        expected = logits(plain)
        assert (found - expected).norm() <= (0.0 if exact else 0.01) * expected.norm()
    stored = load_file(tmp_path / "small" / "model.safetensors")
    for name, layer in kept.items():
        codes = stored[f"{name}.weight_packed"]
        assert codes.dtype == torch.uint8
        assert codes.shape == (layer.out_features, layer.in_features // 2)
        assert stored[f"{name}.weight_scale"].element_size() == 1
        assert (f"{name}.input_global_scale" in stored) == (
            inputs is not None and inputs.two_scales
        )


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("scheme", FLOATS)
def test_four_bit_floats_of_one_layer(scheme: str, tmp_path: Path) -> None:
    ours = small(llama(), scheme)
    save_compressed(ours, tmp_path / "small", lambda _: None)
    theirs = load_hf_model(tmp_path / "small", dtype=torch.float32)
    assert theirs.dtype == torch.float32
    for name, layer in quantized_layers(ours).items():
        x = torch.randn(8, layer.in_features)
        expected = layer.linear(x)
        apart = (theirs.get_submodule(name)(x) - expected).norm() / expected.norm()
        assert apart < (1e-6 if isinstance(layer.grid, MxE2M1) else 3e-3), name


@pytest.mark.slow
def test_matrices_that_an_engine_multiplies_as_one_share_a_scale(tmp_path: Path) -> None:
    scheme = "nvfp4(scales='static', method=smooth(norms=True))"
    save_compressed(small(llama(), scheme), tmp_path / "small", lambda _: None)
    stored = load_file(tmp_path / "small" / "model.safetensors")
    for half, names in (("self_attn", "qkv"), ("mlp", ("gate", "up"))):
        for part in ("weight", "input"):
            each = [
                stored[f"model.layers.1.{half}.{name}_proj.{part}_global_scale"] for name in names
            ]
            assert all(torch.equal(one, each[0]) for one in each)
    alone = stored["model.layers.1.self_attn.o_proj.weight_global_scale"]
    assert not torch.equal(alone, stored["model.layers.0.self_attn.o_proj.weight_global_scale"])


@pytest.mark.parametrize("width", [64, 96])
@pytest.mark.parametrize("scheme", ["fp8", EXACT[0]])
def test_an_inner_rotation_is_a_transform(width: int, scheme: str, tmp_path: Path) -> None:
    model = convert_hf_model(llama(intermediate_size=width))
    ours = small(rotate(model, inner=True), scheme)
    folder = tmp_path / "small"
    save_compressed(ours, folder, lambda _: None)
    table = json.loads((folder / "config.json").read_text("utf-8"))["quantization_config"]
    (group,) = table["transform_config"]["config_groups"].values()
    assert group["apply"][0]["targets"] == [r"re:(.*\.)?mlp\.down_proj$"]
    stored = load_file(folder / "model.safetensors")
    (matrix,) = [
        tensor for name, tensor in stored.items() if name.endswith(".rotation_0_input.weight")
    ]
    torch.testing.assert_close(matrix @ matrix.T, width * torch.eye(width), atol=1e-3, rtol=0)
    assert matrix.abs().allclose(torch.ones(())) == (width == 64)
    with pytest.raises(ValueError, match="needs transform_config: vLLM or wakeful"):
        AutoModelForCausalLM.from_pretrained(folder)
    theirs = load_hf_model(folder, dtype=torch.float32).eval()
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("scheme", "skip"),
    [
        ("mxfp4(rotation=32)", ["lm_head"]),
        ("scheme(weights=mx_e2m1(per='channel'), rotation=16)", ["lm_head", "*.layers.1.mlp.*"]),
        ("w4a16(weights=absmax(bits=4, per='channel', group=16), rotation=16)", ["lm_head"]),
        ("fp8(rotation=8)", ["lm_head", "*.layers.0.self_attn.o_proj"]),
    ],
)
def test_rotations_of_a_scheme_are_transforms(scheme: str, skip: list[str], tmp_path: Path) -> None:
    ours = quantize_module(llama(), scheme, skip=skip)
    kept, folder = quantized_layers(ours), tmp_path / "small"
    save_compressed(ours, folder, lambda _: None)
    table = json.loads((folder / "config.json").read_text("utf-8"))["quantization_config"]
    (group,) = table["transform_config"]["config_groups"].values()
    size = parse_scheme(scheme).rotation
    assert group["head_dim"] == size
    with pytest.raises(ValueError, match="needs transform_config: vLLM or wakeful"):
        AutoModelForCausalLM.from_pretrained(folder)
    # compressed-tensors itself finds the layers that are rotated, and no others.
    (apply,) = group["apply"]
    module = pytest.importorskip("compressed_tensors.utils")
    matched = module.match_named_modules(llama(), apply["targets"], apply["ignore"])
    assert {name for name, _ in matched} == kept.keys()
    theirs = load_hf_model(folder, dtype=torch.float32).eval()
    for name, layer in kept.items():
        x = torch.randn(1, 8, layer.in_features)
        expected = layer.linear(x)
        read = theirs.get_submodule(name)(x)
        assert (read - expected).norm() < 3e-3 * expected.norm(), name
    apart = logits(theirs) - logits(ours)
    assert apart.norm() < 0.01 * logits(ours).norm()


def phi() -> Phi3ForCausalLM:
    torch.manual_seed(0)
    return Phi3ForCausalLM(Phi3Config(**SIZES, pad_token_id=0, tie_word_embeddings=True)).eval()


@pytest.mark.parametrize(
    ("make", "skip", "advice"),
    [
        (llama, [], ["lm_head"]),
        (lambda: convert_hf_model(llama()), [], ["head"]),
        (qwen, [], [f"model.layers.*.self_attn.{each}_proj" for each in "qkv"]),
        (lambda: rotate(convert_hf_model(llama()), inner=True), ["head"], ["blocks.*.mlp.down"]),
        (phi, [], ["model.layers.*.self_attn.qkv_proj", "model.layers.*.mlp.gate_up_proj"]),
    ],
)
def test_rotations_that_vllm_lacks_are_refused(
    make: Callable[[], nn.Module], skip: list[str], advice: list[str], tmp_path: Path
) -> None:
    model, scheme = make(), parse_scheme("mxfp4(rotation=16)")
    layers = linear_layers(model, skip)
    message = re.escape(f"--skip {' '.join(map(repr, advice))}, choose")
    with pytest.raises(WakefulError, match=message):
        check_compressed(model, dict.fromkeys(layers, scheme), layers)
    ours = quantize_module(model, scheme, skip=skip)
    with pytest.raises(WakefulError, match=message):
        save_compressed(ours, tmp_path / "small", lambda _: None)
    # What the error advises is taken.
    if model.__class__.__name__ != "Decoder" or not skip:  # else the inner rotation is a transform
        layers = linear_layers(model, [*skip, *advice])
        check_compressed(model, dict.fromkeys(layers, scheme), layers)


@torch.inference_mode()
def test_a_decoder_with_rotated_inputs_is_read_back(tmp_path: Path) -> None:
    # Rounded inputs would tip over between bfloat16, in which ours computes, and float32.
    scheme = "scheme(weights=mx_e2m1(per='channel'), rotation=8)"
    model = convert_hf_model(llama()).bfloat16()
    ours = quantize_module(model, scheme, skip=["head", "*.1.mlp.up"])
    save_compressed(ours, tmp_path / "small", lambda _: None)
    theirs = load_hf_model(tmp_path / "small", dtype=torch.float32).eval()
    expected = logits(ours).float()
    assert (logits(theirs) - expected).norm() < 0.03 * expected.norm()
    rotated = [module for module in theirs.modules() if hasattr(module, "input_rotation")]
    assert len(rotated) == len(quantized_layers(ours)) == 13


def test_targets_are_the_rotated_layers_alone() -> None:
    names = ["model.projection", "model.layers.0.mlp.up", "model.layers.1.mlp.up", "a.b.mlp.upper"]
    config, tensors = make_transform_config(
        [(torch.eye(2), names[:2]), (torch.eye(4), names[2:3])], names
    )
    groups = config["config_groups"].values()
    sets = [
        {
            name for name in names
            if any(re.match(target.removeprefix("re:"), name) for target in apply["targets"])
            and name not in apply["ignore"]
        }
        for group in groups for apply in group["apply"]
    ]  # fmt: skip
    assert sets == [set(names[:2]), set(names[2:3])]
    assert [group["head_dim"] for group in groups] == [2, 4]
    assert [len(matrix) for matrix in tensors.values()] == [2, 4]


def test_the_advice_on_groups_keeps_the_rotation() -> None:
    model, scheme = llama(hidden_size=48), parse_scheme("w4a16(rotation=16)")
    layers = linear_layers(model, ["lm_head"])
    with pytest.raises(WakefulError, match=r"group=16\), rotation=16"):
        check_compressed(model, dict.fromkeys(layers, scheme), layers)


def test_a_rotated_layer_with_a_bias_is_refused() -> None:
    turned = rotate(convert_hf_model(llama(mlp_bias=True)), inner=True)
    layers = linear_layers(turned)
    with pytest.raises(WakefulError, match="a bias of a layer whose inputs are rotated"):
        check_compressed(turned, dict.fromkeys(layers, parse_scheme("fp8")), layers)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("kind", "head_dim", "location", "inverse"),
    [
        ("hadamard", None, "input", False),
        ("hadamard", 16, "output", True),
        ("random-hadamard", 32, "input", True),
        ("random-hadamard", None, "output", False),
    ],
)
def test_transforms_of_others(
    kind: str, head_dim: int | None, location: str, inverse: bool
) -> None:
    transforms = pytest.importorskip("compressed_tensors.transform")
    args = {"targets": ["re:.*up_proj$"], "location": location, "inverse": inverse}
    group = {"type": kind, "apply": [args], "head_dim": head_dim}
    expected, found = llama(), llama()
    config = transforms.TransformConfig(config_groups={"R4": group})
    transforms.apply_transform_config(expected, config)
    made = {name: tensor for name, tensor in expected.state_dict().items() if "R4" in name}
    assert made
    attach_transforms(found, {"R4": group}, made if kind != "hadamard" else {}, "it")
    torch.testing.assert_close(logits(found), logits(expected), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(found), logits(llama()), atol=1e-2)


def test_transforms_that_are_not_known_are_refused() -> None:

    def fails(message: str, **group: object) -> None:
        args = {"targets": ["re:.*up_proj$"], "location": "input"}
        table = {"type": "hadamard", "apply": [args | dict(group.pop("args", {}))]} | group  # pyright: ignore
        with pytest.raises(WakefulError, match=message):
            attach_transforms(llama(hidden_size=48), {"R4": table}, {}, "it")

    fails("'random-matrix', which readers interpret differently", type="random-matrix")
    fails("which readers interpret differently", randomize=True)
    fails("acts on k_cache", args={"location": "k_cache"})
    fails("names no layer", args={"targets": ["re:.*nothing$"]})
    fails("no matrix of 48 channels")


@pytest.mark.parametrize(
    "scheme", ["w4a16(weights=absmax(bits=4, per='channel'))", "fp8(method=smooth(norms=True))"]
)
@pytest.mark.parametrize("tied", [True, False])
def test_our_decoder_becomes_the_stock_architecture(
    scheme: str, tied: bool, tmp_path: Path
) -> None:
    decoder = convert_hf_model(llama(tie_word_embeddings=tied, attention_bias=True))
    ours = small(decoder, scheme)
    theirs = saved(ours, tmp_path / "small")
    assert isinstance(theirs, LlamaForCausalLM)
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-4, atol=1e-4)
    table = json.loads((tmp_path / "small" / "config.json").read_text("utf-8"))
    assert table["quantization_config"]["ignore"] == (["lm_head"] if tied else [])
    (group,) = table["quantization_config"]["config_groups"].values()
    assert group["targets"] == ["Linear", *([] if tied else ["lm_head"])]


def test_bfloat16_and_layers_left_as_they_are(tmp_path: Path) -> None:
    model = llama().bfloat16()
    ours = quantize_module(
        model, "scheme(weights=absmax(bits=8, per='channel'))", skip=["*.o_proj"]
    )
    theirs = saved(ours, tmp_path / "small")
    assert theirs.dtype == torch.bfloat16
    apart = (logits(theirs) - logits(ours)).float().norm()
    assert apart < 0.02 * logits(model).float().norm()
    output = theirs.get_parameter("model.layers.0.self_attn.o_proj.weight")
    assert torch.equal(output, model.get_parameter("model.layers.0.self_attn.o_proj.weight"))


def test_which_layers_read_which_norm() -> None:
    found = readers_of_norms(llama())
    assert found["model.layers.1.input_layernorm"] == [
        f"model.layers.1.self_attn.{name}_proj" for name in "qkv"
    ]
    assert sum(map(len, found.values())) == 2 * 5  # Transformers cuts what the head reads
    found = readers_of_norms(convert_hf_model(llama()))
    assert found["blocks.0.mlp_norm"] == ["blocks.0.mlp.gate", "blocks.0.mlp.up"]
    assert found["norm"] == ["head"]


def test_which_layers_read_which_tensor() -> None:
    olmo = Olmo2ForCausalLM(Olmo2Config(**SIZES, pad_token_id=0)).eval()  # norms come after
    for model in (llama(), olmo):
        expected = [f"model.layers.1.self_attn.{name}_proj" for name in "qkv"]
        assert expected in readers_of_tensors(model)
    found = readers_of_tensors(convert_hf_model(llama()))
    assert ["blocks.0.mlp.gate", "blocks.0.mlp.up"] in found
    assert ["blocks.1.mlp.down"] in found
    assert sum(map(len, found)) == 2 * 7 + 1


def test_smoothing_only_after_norms() -> None:
    model = llama()
    layers = quantized_layers(small(model, "fine(method=smooth(norms=True))"))
    read = {name for names in readers_of_norms(model).values() for name in names}
    for name, layer in layers.items():
        assert layer.divisor is not None
        assert bool((layer.divisor == 1).all()) == (name not in read), name
    assert set(layers) == set(linear_layers(model))


@pytest.mark.slow
def test_what_the_format_lacks_is_refused(tmp_path: Path) -> None:
    def fails(message: str, model: nn.Module, scheme: str) -> None:
        """Before anything is quantized, and of the quantized model."""
        parsed = parse_scheme(scheme)
        layers = linear_layers(model) if parsed.weights is not None else {}
        check = partial(check_compressed, model, dict.fromkeys(layers, parsed), layers)
        with pytest.raises(WakefulError, match=message):
            check() if layers else compressed_config({parsed: ()})
        with pytest.raises(WakefulError, match=message):
            save_compressed(small(model, scheme), tmp_path / "no", lambda _: None)
        assert not list(tmp_path.iterdir())

    model = llama()
    fails("coarse cannot be saved as compressed-tensors", model, "coarse")
    fails("keys and values of 8 bits with calibrated scales per tensor or head", model, "kv8")
    fails(r"nvfp4\(scales='static'\)", model, "nvfp4")
    fails("cannot be saved", model, "scheme(weights=nv_e2m1(per='channel'))")
    fails("cannot be saved", model, "mxfp4(inputs=e4m3(per='token'))")
    fails("cannot be saved", model, "fp8(inputs=absmax(bits=8, per='token'))")
    fails("weights of 4 or 8 bits", model, "scheme(weights=absmax(bits=6, per='channel'))")
    fails(r"moderate\(scales='static'\)", model, "moderate")
    fails(
        "cannot be saved",
        model,
        "w8a8(inputs=absmax(bits=8, per='token', clip=0.9))",
    )
    grid = "w4a16(weights=absmax(bits=4, per='channel', group=24))"
    fails(r"whole groups of 24, .*group=16.*, or leave --save out", model, grid)
    fails("whole groups of 32, .* group: leave --save out", llama(hidden_size=48), "mxfp4")
    fails(r"smooth\(norms=True\)", model, "fine(method=smooth)")
    fails(r"without a zero point \(w4a16\)", model, "w4")
    gpt2 = GPT2LMHeadModel(GPT2Config(vocab_size=61, n_embd=32, n_layer=1, n_head=2)).eval()
    fails("an nn.Linear of Transformers", gpt2, "fine")
    fails("joins several of ours", convert_hf_model(gpt2), "fine")
    fails(
        r"our own class: .*--rotate hadamard, --rotate_inner",
        tiny_decoder(dtype=torch.float32, route="resformer"),
        "fine",
    )
    part = quantize_module(
        model, "fine(method=smooth(norms=True))", calibration=TEXT, skip=["*.q_proj"]
    )
    smooth, some = parse_scheme("fine(method=smooth(norms=True))"), ["*.q_proj"]
    layers = linear_layers(model, some)
    with pytest.raises(WakefulError, match="read one norm and divide it differently"):
        check_compressed(model, dict.fromkeys(layers, smooth), layers)
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
    part = quantize_module(model, "fine", skip=["*.mlp.experts", "*.mlp.gate"])
    save_compressed(part, tmp_path / "small", lambda _: None)
    stored = load_file(tmp_path / "small" / "model.safetensors")
    assert torch.equal(stored[name], model.get_buffer(name))


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme", [EXACT[0], "scheme(weights=absmax(bits=8, per='channel'), method=gptq)"]
)
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_experts_are_written_one_by_one(name: str, scheme: str, tmp_path: Path) -> None:
    """As their own checkpoints have them, which is where vLLM looks for them."""
    model, found = model_of(name), parse_scheme(scheme)
    apart = prepare_model(model)
    layers = linear_layers(apart)
    check_compressed(apart, dict.fromkeys(layers, found), layers)
    ours = quantize_module(model, found, calibration=TEXT * 2 if found.calibrated else ())
    theirs = saved(ours, tmp_path / "small")
    assert type(theirs) is type(model)
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-4, atol=1e-4)
    assert not torch.allclose(logits(theirs), logits(model), atol=1e-3)
    again = load_hf_model(tmp_path / "small", dtype="auto")
    assert torch.equal(logits(again), logits(theirs))
    stored = load_file(tmp_path / "small" / "model.safetensors")
    block = "block_sparse_moe" if name == "Mixtral" else "mlp"
    names = ("w1", "w3", "w2") if name == "Mixtral" else ("gate_proj", "up_proj", "down_proj")
    for number, each in enumerate(names):
        layer = f"model.layers.1.mlp.experts.{'down' if number == 2 else 'gate_up'}_proj.3"
        codes = quantized_layers(ours)[layer]
        place = f"model.layers.1.{block}.experts.3.{each}"
        size = 48 if name == "Mixtral" else 16
        rows = slice(0, None) if number == 2 else slice(size * number, size * (number + 1))
        assert torch.equal(stored[f"{place}.weight_scale"], codes.scale.flatten(1)[rows])
        assert stored[f"{place}.weight_packed"].dtype == torch.int32
    config = json.loads((tmp_path / "small" / "config.json").read_text("utf-8"))
    assert f"model.layers.1.{block}.gate" in config["quantization_config"]["ignore"]


def test_experts_that_stay_are_one_tensor_and_named_by_themselves(tmp_path: Path) -> None:
    """Transformers reads them as one tensor alone, and vLLM asks whether expert 0 is left out."""
    ours = quantize_module(model_of("Mixtral"), EXACT[0], skip=["*.1.mlp.experts"])
    theirs = saved(ours, tmp_path / "small")
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-4, atol=1e-4)
    config = json.loads((tmp_path / "small" / "config.json").read_text("utf-8"))
    (pattern,) = (each for each in config["quantization_config"]["ignore"] if each[:3] == "re:")
    place = "model.layers.{}.block_sparse_moe.experts.0.w1"
    assert re.match(pattern[3:], place.format(1))
    assert not re.match(pattern[3:], place.format(0))


def test_experts_that_have_no_place_are_refused() -> None:
    def fails(match: str, name: str, scheme: str, skip: Sequence[str] = ()) -> None:
        found = parse_scheme(scheme)
        apart = prepare_model(model_of(name), skip)
        layers = linear_layers(apart, skip)
        with pytest.raises(WakefulError, match=match):
            check_compressed(apart, dict.fromkeys(layers, found), layers)

    fails("in whole numbers, with inputs neither quantized", "Mixtral", "fp8")
    fails("in whole numbers, with inputs neither quantized", "Qwen3Moe", FLOATS[0])
    fails("or an expert that files store by itself, and .*gpt_oss", "GptOss", EXACT[0])
    whole = r"skip them all with --skip model\.layers\.1\.mlp\.experts, or"
    fails(whole, "Mixtral", EXACT[0], ["*.1.mlp.experts.down_proj.2"])
    fails(whole, "Mixtral", EXACT[0], ["*.1.mlp.experts.*"])


@torch.no_grad()
@pytest.mark.parametrize("skip", [(), ("lm_head",)])
def test_a_head_that_was_untied_in_memory_is_written(skip: tuple[str, ...], tmp_path: Path) -> None:
    model = llama(tie_word_embeddings=True)
    model.lm_head.weight = nn.Parameter(torch.randn_like(model.lm_head.weight))  # pyright: ignore
    assert model.config.tie_word_embeddings
    ours = quantize_module(model, EXACT[3], skip=skip)
    theirs = saved(ours, tmp_path / "small")
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-4, atol=1e-4)


FOUR = "scheme(weights=absmax(bits=4, per='channel', group={}, scale='bfloat16'))"
EIGHT = "scheme(weights=absmax(bits=8, per='channel', scale='bfloat16'))"


def in_several(
    model: nn.Module, scheme: str, others: dict[str, str], skip: Sequence[str] = ()
) -> nn.Module:
    """Return a model quantized by a scheme, with other schemes by pattern of layers' names."""
    quantized = quantize_module(model, scheme, skip=skip)
    for pattern, other in others.items():
        layers = quantized_layers(quantize_module(model, other, skip=skip))
        put(quantized, {name: layers[name] for name in layers if fnmatchcase(name, pattern)})
    return quantized


@pytest.mark.parametrize("make", [llama, qwen])
def test_layers_of_several_schemes_are_one_file(
    make: Callable[[], PreTrainedModel], tmp_path: Path
) -> None:
    model, folder = make(), tmp_path / "small"
    others = {"*.0.self_attn.[qkv]_proj": EIGHT, "*.down_proj": FOUR.format(32)}
    ours = in_several(model, FOUR.format(16), others, skip=["*.1.mlp.gate_proj", "*.1.mlp.up_proj"])
    theirs = saved(ours, folder)
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-4, atol=1e-4)
    for name, layer in quantized_layers(ours).items():
        weight = theirs.get_submodule(name).weight
        assert torch.equal(weight.float(), layer.dequantize()), name
    again = load_hf_model(folder, dtype="auto")
    assert torch.equal(logits(again), logits(theirs))
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config["format"] == "pack-quantized"
    groups = config["config_groups"].values()
    assert sorted(len(group["targets"]) for group in groups)[:2] == [2, 3]
    targets = [name for group in groups for name in group["targets"]]
    assert "Linear" not in targets  # it would take fused layers before their names are looked at
    assert set(targets) == set(quantized_layers(ours))
    assert {"model.layers.1.mlp.gate_proj", "model.layers.1.mlp.up_proj"} <= set(config["ignore"])
    scales = [t for n, t in load_file(folder / "model.safetensors").items() if "weight_scale" in n]
    assert {scale.dtype for scale in scales} == {torch.bfloat16}


def test_whole_numbers_and_floats_in_one_file(tmp_path: Path) -> None:
    model = llama()
    ours = in_several(model, "fp8", {"*.down_proj": FOUR.format(16)})
    theirs = saved(ours, tmp_path / "small")
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-4, atol=1e-4)
    config = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"


def test_experts_of_another_scheme_than_the_rest_are_one_file(tmp_path: Path) -> None:
    model = model_of("Mixtral")
    ours = in_several(prepare_model(model), EXACT[0], {"*.self_attn.*": EIGHT})
    theirs = saved(ours, tmp_path / "small")
    torch.testing.assert_close(logits(theirs), logits(ours), rtol=1e-4, atol=1e-4)
    config = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    targets = [group["targets"] for group in config["config_groups"].values()]
    assert any(r"re:.*\.experts\..*" in each for each in targets)
    several = in_several(prepare_model(model), EXACT[0], {"*.1.mlp.experts.*": EIGHT})
    with pytest.raises(WakefulError, match="experts of several schemes"):
        saved(several, tmp_path / "no")
