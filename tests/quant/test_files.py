"""Saved quantized models: the same logits, and nothing but what fits is read."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_convert import gpt2, llama, logits
from transformers import AutoModelForCausalLM, AutoTokenizer

import wakeful
from evaluation.models import save_llama
from helpers import some_tokens, tiny_decoder
from wakeful.errors import WakefulError
from wakeful.hf.quantized import (
    HEADER,
    WEIGHTS,
    file_bytes,
    load_quantized,
    save_quantized,
    state_bytes,
)
from wakeful.quant import NAMED, parse_scheme, quantize, quantized_layers
from wakeful.quant.measure import measure

CPU = torch.device("cpu")


def saved(model: torch.nn.Module, folder: Path) -> Path:
    folder.mkdir()
    save_quantized(model, folder, name="tiny", context=24, bos=None)
    return folder


MODELS = {
    "own": lambda: tiny_decoder(dtype=torch.float32).eval(),
    "svformer": lambda: tiny_decoder(dtype=torch.float32, route="svformer", bias=True,
                                     mlp="gelu", norm="layernorm", tied=True).eval(),
    "gated": lambda: tiny_decoder(dtype=torch.float32, route="gated", depth="denseformer",
                                  normalizer="softmax1(learned=True)").eval(),
    "gpt2": gpt2,
    "llama": llama,
    "llama tied": lambda: llama(tie_word_embeddings=True),
    "bfloat16": lambda: tiny_decoder(dtype=torch.bfloat16).eval(),
}  # fmt: skip


def test_the_gain_of_a_norm_may_be_negative(tmp_path: Path) -> None:
    model = tiny_decoder(dtype=torch.float32, norm="gated_norm(rank=3)").eval()
    with torch.no_grad():
        model.blocks[1].get_submodule("mlp_norm").get_parameter("scale")[0] = -0.1
    small = quantize(model, "w4")
    again, _ = load_quantized(saved(small, tmp_path / "q"), device=CPU)
    torch.testing.assert_close(logits(again), logits(small))


@pytest.mark.parametrize("scheme", ["fine", "coarse", "w4", "coarse static"])
@pytest.mark.parametrize("name", MODELS)
def test_the_loaded_model_is_the_saved_one_to_the_bit(
    name: str, scheme: str, tmp_path: Path
) -> None:
    model = MODELS[name]()
    if scheme.endswith("static"):
        parsed = parse_scheme("coarse", "static")
        small = quantize(
            model, parsed, arithmetic="integer", calibration=[some_tokens(1, 12)], skip=["*1.*"]
        )
    else:
        small = quantize(model, scheme, arithmetic="integer")
    folder = saved(small, tmp_path / "q")
    again, header = load_quantized(folder, device=CPU)
    assert type(again) is type(model)
    assert torch.equal(logits(again), logits(small))
    assert header.scheme == next(iter(quantized_layers(small).values())).scheme.definition
    assert list(quantized_layers(again)) == list(quantized_layers(small))
    assert not any(p.requires_grad for p in again.parameters())
    reference, _ = load_quantized(folder, device=CPU, arithmetic="reference")
    if scheme == "w4":  # scaled after the sum instead of before: rounded elsewhere
        far = 0.1 if name == "bfloat16" else 1e-4  # several roundings of 0.4 % between layers
        torch.testing.assert_close(logits(reference), logits(small), rtol=far, atol=far)
    else:
        assert torch.equal(logits(reference), logits(small))


def test_positions_are_not_rounded_to_the_type_of_the_weights(tmp_path: Path) -> None:
    model = llama().to(torch.bfloat16)
    exact = llama().model.rotary_emb.inv_freq
    model.model.rotary_emb.inv_freq = exact.clone()  # as from_pretrained(dtype=...) leaves it
    small = quantize(model, "w4")
    folder = saved(small, tmp_path / "q")
    save_llama(tmp_path / "other")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).write_text((tmp_path / "other" / file).read_text())
    again, _ = load_quantized(folder, device=CPU)
    assert again.get_parameter("model.norm.weight").dtype == torch.bfloat16
    assert torch.equal(logits(again), logits(small))
    halves = wakeful.load(folder, device=CPU, dtype=torch.bfloat16).module
    singles = wakeful.load(folder, device=CPU, dtype=torch.float32).module
    assert singles.get_parameter("model.norm.weight").dtype == torch.float32
    for loaded in (again, halves, singles):
        assert torch.equal(loaded.get_buffer("model.rotary_emb.inv_freq"), exact)


@pytest.mark.filterwarnings("ignore:read back:wakeful.errors.WakefulWarning")  # hooks stay behind
@pytest.mark.parametrize("make", [llama, lambda: tiny_decoder(dtype=torch.float32).eval()])
def test_tensors_keep_the_types_that_they_were_quantized_beside(make, tmp_path: Path) -> None:
    model = make().to(torch.bfloat16)
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.float()
            module.register_forward_hook(lambda _module, _args, output: output.bfloat16())
    small = quantize(model, "w8a8", skip=["*head"])
    again, header = load_quantized(saved(small, tmp_path / "q"), device=CPU)
    assert header.dtype == "bfloat16"
    kinds = {name: tensor.dtype for name, tensor in small.state_dict().items()}
    assert {name: tensor.dtype for name, tensor in again.state_dict().items()} == kinds
    assert torch.float32 in kinds.values()
    for name, tensor in small.named_parameters():
        assert torch.equal(again.get_parameter(name), tensor)


def test_what_stays_is_written_in_the_type_of_the_files(tmp_path: Path) -> None:
    model = tiny_decoder(dtype=torch.float32, qk_norm=True).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    small = quantize(model, "w4", arithmetic="integer")
    save_quantized(small, tmp_path, name="it", context=24, bos=None, stored=torch.bfloat16)
    kinds = {name: each.dtype for name, each in load_file(tmp_path / WEIGHTS).items()}
    stays = [name for name, _ in small.named_parameters()]
    assert "blocks.0.attention.query.norm.weight" in stays
    assert all(kinds[name] == torch.bfloat16 for name in stays)
    assert kinds["blocks.0.attention.query.scale"] == torch.float32
    again, _ = load_quantized(tmp_path, device=CPU)
    assert torch.equal(logits(again), logits(small))


def test_the_file_is_smaller_by_what_the_grids_save(tmp_path: Path) -> None:
    model = tiny_decoder(dtype=torch.float32, width=64, mlp_width=160, head_width=16).eval()
    linear = sum(
        layer.in_features * layer.out_features
        for layer in quantized_layers(quantize(model, "fine")).values()
    )
    channels = sum(
        layer.out_features for layer in quantized_layers(quantize(model, "fine")).values()
    )
    full = state_bytes(model)
    for scheme, expected in (
        ("fine", full - 3 * linear + 4 * channels),
        ("moderate", full - 3 * linear + 4 * 29),
        ("w4", full - 4 * linear + linear // 2 + 8 * channels),
    ):
        small = quantize(model, scheme)
        assert state_bytes(small) == expected
        folder = saved(small, tmp_path / scheme)
        assert expected < file_bytes(folder) < expected + 20_000
    assert state_bytes(tiny_decoder(tied=True)) < state_bytes(tiny_decoder())


@pytest.mark.parametrize("scheme", ["w4g128", "fp8", "mxfp4", "nvfp4"])
def test_groups_and_floats_are_saved_to_the_bit(scheme: str, tmp_path: Path) -> None:
    for name in ("bfloat16", "gpt2"):
        small = quantize(MODELS[name](), scheme, arithmetic="integer")
        folder = saved(small, tmp_path / name)
        again, _ = load_quantized(folder, device=CPU)
        assert torch.equal(logits(again), logits(small))
    if scheme == "w4g128":
        return
    path = folder / WEIGHTS
    good = load_file(path)
    layer = next(name for name in good if name.endswith(".scale")).removesuffix(".scale")
    code = "integers" if scheme == "fp8" else "scale"
    for byte in (127,) if scheme == "fp8" else (0, 255):  # NaN; nothing, infinite or NaN
        save_file(good | {f"{layer}.{code}": torch.full_like(good[f"{layer}.{code}"], byte)}, path)
        assert "is damaged" in refused(folder)


@pytest.mark.parametrize("scheme", ["w4g128_gptq", "w4g128(method=smooth)",
                                    "smoothquant(scales='static')", "kv4",
                                    "fine(cache=zeropoint(bits=4, per='token'))"])  # fmt: skip
def test_methods_and_caches_are_saved_to_the_bit(scheme: str, tmp_path: Path) -> None:
    asked = parse_scheme(scheme)
    given = [some_tokens(1, 12)] if asked.calibrated else []
    small = quantize(MODELS["svformer"](), asked, arithmetic="integer", calibration=given)
    folder = saved(small, tmp_path / "q")
    again, header = load_quantized(folder, device=CPU)
    assert torch.equal(logits(again), logits(small))
    assert header.quantized_as == asked
    path = folder / HEADER
    table = json.loads(path.read_text())
    path.write_text(json.dumps(table | {"layers": [] if header.layers else ["head"]}))
    assert "layers do not go with the scheme" in refused(folder)


@pytest.mark.parametrize(
    "scheme",
    [
        *(name for name, scheme in NAMED.items() if scheme.weights is not None),
        "coarse(scales='static')", "smoothquant(scales='static')", "w4a16(method=gptq)",
        "nvfp4(method=gptq)", "w4a16(method=gptq(act_order=False))",
    ],
)  # fmt: skip
def test_matrices_of_zeros_stay_zeros(scheme: str, tmp_path: Path) -> None:
    model = tiny_decoder(dtype=torch.float32).eval()
    block = model.blocks[1]
    for layer in (block.attention.value, block.attention.out, block.mlp.up, block.mlp.down):
        layer.weight.data.zero_()
    known = parse_scheme(scheme)
    text = [some_tokens(2, 9)] if known.calibrated else []
    small = quantize(model, known, calibration=text)
    again, _ = load_quantized(saved(small, tmp_path / "q"), device=CPU)
    layers = quantized_layers(again)
    for name in ("attention.value", "attention.out", "mlp.up", "mlp.down"):
        assert not layers[f"blocks.1.{name}"].dequantized().any()
    found = measure("m", model, {"q": again}, [some_tokens(1, 9)]).layers
    for kind in ("attention.value", "attention.out", "mlp.up", "mlp.down"):
        errors = found.filter(layer=1, kind=kind, metric="relative_error")["value"]
        assert errors.to_list() == [0.0, 0.0, 0.0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved(quantize(tiny_decoder(dtype=torch.float32).eval(), "fine"), tmp_path / "q")


def refused(folder: Path) -> str:
    with pytest.raises(WakefulError) as caught:
        load_quantized(folder, device=CPU)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "has format 2; this wakeful reads 1"),
        ({"format": True}, "format must be a whole number, got True"),
        ({"scheme": "scheme(weights=int3)"}, "unknown grid or method 'int3'"),
        (
            {"scheme": "scheme(weights=zeropoint(bits=4, per='channel'))"},
            "no 'blocks.0.attention.key.zero'",
        ),
        (
            {"scheme": "scheme(weights=absmax(bits=8, per='tensor'))"},
            "is float32 (16, 1), and the model needs",
        ),
        ({"scales": "static"}, "fine has nothing to calibrate"),
        ({"scales": "warm"}, "scales must be one of dynamic, static, got 'warm'"),
        ({"dtype": "load"}, "dtype must be one of float32"),
        ({"kind": "pickle"}, "kind must be one of decoder, transformers, got 'pickle'"),
        ({"layers": []}, "layers do not go with the scheme fine"),
        ({"layers": [3]}, "layers[0] must be a string, got 3"),
        ({"layers": ["blocks.9.mlp.up"]}, "no linear layer 'blocks.9.mlp.up'"),
        ({"layers": ["embed"]}, "no linear layer 'embed'"),
        ({"layers": ["blocks.0.mlp.up"]}, "it does not belong to this quantized.json"),
        ({"model": [1]}, "model must be a table"),
        ({"model": {"width": 0}}, "model.width must be at least 1"),
        ({"model": {"wdith": 4}}, "unknown key 'model.wdith'"),
        ({"bos": "x"}, "bos must be a whole number, got 'x'"),
        ({"context": None}, "context must be a whole number, got None"),
        ({"others": {"head": ["w4"]}}, "others must be layers with a scheme and its scales each"),
        ({"attention": "sdpa"}, "attention must be one of"),
        ({"model": None}, "model is missing"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(folder: Path, change: dict, message: str) -> None:
    path = folder / HEADER
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    assert message in refused(folder)


def test_a_header_that_is_none_is_refused(folder: Path) -> None:
    (folder / HEADER).write_text("[1]")
    assert "holds no JSON object" in refused(folder)
    (folder / HEADER).write_bytes(b"\xff{")
    assert "is not JSON" in refused(folder)
    (folder / HEADER).write_text("[" * 100_000)
    assert "is not JSON" in refused(folder)


def test_tensors_that_do_not_fit_are_refused(folder: Path) -> None:
    path = folder / WEIGHTS
    good = load_file(path)
    name = "blocks.1.mlp.up.integers"

    def with_(**tensors: torch.Tensor) -> str:
        save_file(good | tensors, path)
        return refused(folder)

    assert "is int8 (3, 4), and the model needs int8 (20, 16)" in with_(
        **{name: torch.zeros(3, 4, dtype=torch.int8)}
    )
    assert "is int32 (20, 16)" in with_(**{name: good[name].int()})
    assert "an unknown 'evil'" in with_(evil=torch.zeros(1))
    scale = "blocks.1.mlp.up.scale"
    assert "has a scale that is not positive" in with_(**{scale: -good[scale]})
    assert "has a NaN or an infinity" in with_(**{scale: good[scale] * float("nan")})
    assert "has a NaN or an infinity" in with_(**{"embed.weight": good["embed.weight"] / 0})
    save_file({key: each for key, each in good.items() if key != name}, path)
    assert f"no '{name}'" in refused(folder)
    path.write_bytes(path.read_bytes()[:-100])
    assert "is not a whole safetensors file" in refused(folder)
    path.unlink()
    assert "has no model.safetensors" in refused(folder)


def test_a_config_that_describes_no_model_is_refused(tmp_path: Path) -> None:
    folder = saved(quantize(llama(), "fine"), tmp_path / "q")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "evil"}))
    assert "describes no model" in refused(folder)
    (folder / "config.json").unlink()
    assert "describes no model" in refused(folder)


def test_a_full_precision_model_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(WakefulError, match="not quantized: nothing to save"):
        save_quantized(gpt2(), tmp_path, name="x", context=4, bos=None)
    assert not list(tmp_path.iterdir())


def test_transformers_alone_refuses_a_quantized_folder(tmp_path: Path) -> None:
    model = llama()
    folder = saved(quantize(model, "fine", arithmetic="integer"), tmp_path / "q")
    read = (
        "import sys; from transformers import AutoModelForCausalLM; "
        "AutoModelForCausalLM.from_pretrained(sys.argv[1])"
    )
    alone = subprocess.run(
        [sys.executable, "-c", read, str(folder)], capture_output=True, text=True, check=False
    )
    assert alone.returncode != 0
    assert "wakeful_quantized" in alone.stderr
    known = AutoModelForCausalLM.from_pretrained(folder)  # wakeful.hf is imported here
    tokens = some_tokens(2, 9)
    with torch.inference_mode():
        ours = load_quantized(folder, device=CPU)[0](tokens).logits
        assert torch.equal(known(tokens).logits, ours)
    placed = AutoModelForCausalLM.from_pretrained(folder, device_map="auto")
    assert placed.device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    for asked in (torch.bfloat16, "bfloat16"):
        narrow = AutoModelForCausalLM.from_pretrained(folder, dtype=asked)
        assert narrow(tokens).logits.dtype == torch.bfloat16
    with pytest.raises(WakefulError, match="device_map = 'balanced' is not a device"):
        AutoModelForCausalLM.from_pretrained(folder, device_map="balanced")


def test_folders_of_before_are_still_read(tmp_path: Path) -> None:
    model = llama()
    folder = saved(quantize(model, "fine", arithmetic="integer"), tmp_path / "q")
    expected = logits(load_quantized(folder, device=CPU)[0])
    model.config.save_pretrained(folder)  # the configuration of the model itself, as it was then
    assert torch.equal(logits(load_quantized(folder, device=CPU)[0]), expected)
    damaged = {"model_type": "wakeful_quantized", "inner": {"model_type": "nothing"}}
    (folder / "config.json").write_text(json.dumps(damaged))
    with pytest.raises(WakefulError, match="inner is damaged"):
        load_quantized(folder, device=CPU)


def test_a_saved_model_has_what_lies_beside_its_tokenizer(tmp_path: Path) -> None:
    source, folder = save_llama(tmp_path / "llama"), tmp_path / "q"
    theirs = AutoTokenizer.from_pretrained(source)
    theirs.add_special_tokens({"pad_token": "!", "unk_token": "?"})
    theirs.chat_template = "{{ messages[0]['content'] }}!"
    theirs.save_pretrained(source)
    said = {"do_sample": True, "top_k": 7, "temperature": 0.5, "eos_token_id": [3, 256]}
    (source / "generation_config.json").write_text(json.dumps(said))
    wakeful.quantize(str(source), "fine", save=str(folder))
    again = AutoTokenizer.from_pretrained(folder)
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template"):
        assert getattr(again, name) == getattr(theirs, name), name
    assert again("a b").input_ids == theirs("a b").input_ids
    for model in (AutoModelForCausalLM.from_pretrained(folder), wakeful.load(folder).module):
        generation = model.generation_config
        assert {name: getattr(generation, name) for name in said} == said
    (folder / "generation_config.json").write_text("{")
    assert "generation_config.json is damaged" in refused(folder)
