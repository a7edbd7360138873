"""Weights that stay in their files: the same numbers as in memory, to the bit."""

import importlib
import re
import sys
from pathlib import Path

import polars.testing
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import embedding, linear
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import wakeful
from verbs.test_diagnose import save_tokenizer
from wakeful import paged
from wakeful.errors import WakefulError
from wakeful.hf.checkpoint_reader import Shards
from wakeful.loading.model import Model
from wakeful.paged import Paged, copy_to_file, is_finite, page_matrices, store_like
from wakeful.probes.running import held_bytes
from wakeful.quantization import quantize_module, quantized_layers
from wakeful.surgery import rotate

loading = importlib.import_module("wakeful.loading.load")  # whose name a function has, too
TEXT = "The quick brown fox jumps over the lazy dog; the dog sleeps on. " * 20
TOKENS = torch.arange(40).view(2, 20) * 7 % 257
SCHEMES = [
    "w4a16", "w4", "fine", "coarse", "mxfp4", "nvfp4", "w4a16(method=gptq)", "mxfp4(rotation=32)",
    "smoothquant(scales='static')",
]  # fmt: skip


@pytest.fixture(params=["float32", "bfloat16"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Give a folder with a random Llama in one of two types."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        initializer_range=0.3,
    )  # fmt: skip
    place = tmp_path / "llama"
    LlamaForCausalLM(config).to(getattr(torch, request.param)).save_pretrained(place)
    save_tokenizer(place)
    return place


@pytest.fixture
def no_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Let no model fit memory."""
    monkeypatch.setattr(loading, "COPIES", 10**12)
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    return monkeypatch


def both(folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str = "float32") -> list[Model]:
    """Return a model in memory, and the same with its weights in their files."""
    with monkeypatch.context() as patch:
        patch.setattr(loading, "COPIES", 0)
        inside = wakeful.load(folder, device="cpu", dtype=dtype)
    found = wakeful.load(folder, device="cpu", dtype=dtype)
    kinds = {type(each) for each in found.module.parameters() if each.ndim > 1}
    assert all(issubclass(kind, Paged) for kind in kinds)
    assert not any(isinstance(each, Paged) for each in inside.module.parameters())
    return [inside, found]


def resident(file: Path) -> int:
    """Return how many bytes of a file's mapping are in this process' memory."""
    parts = Path("/proc/self/smaps").read_text("utf-8").split(str(file))[1:]
    return sum(int(re.search(r"Rss: +(\d+) kB", part)[1]) * 1024 for part in parts)  # pyright: ignore


def test_operations_views_and_casts_are_those_of_the_tensor(
    tmp_path: Path, no_room: object
) -> None:
    tensor = torch.randn(6, 8).bfloat16()
    wide, found = tensor.float(), Paged(copy_to_file(tensor).stored, torch.float32)
    assert torch.equal(linear(torch.ones(2, 8), found), linear(torch.ones(2, 8), wide))
    assert torch.equal(found.T[2:4].double(), wide.T[2:4].double())
    assert isinstance(found.view(2, 24), Paged)
    assert isinstance(found.bfloat16(), Paged)
    ids = torch.tensor([1, 5])
    assert torch.equal(embedding(ids, found), embedding(ids, wide))
    assert found.dtype == torch.float32
    with pytest.raises(RuntimeError, match="cannot be written to"):
        found.mul_(2)
    with pytest.raises(RuntimeError, match="cannot be written to"):
        torch.mul(wide, 2, out=found)
    assert torch.equal(found.clone(), wide)


@pytest.mark.parametrize("made_in", [False, True])
@pytest.mark.parametrize("read_in", [False, True])
def test_views_in_inference_mode_and_outside_it(
    made_in: bool, read_in: bool, no_room: object
) -> None:
    numbers = torch.arange(24.0).view(6, 4)
    with torch.inference_mode(made_in):
        found = copy_to_file(numbers)
    with torch.inference_mode(read_in):
        assert torch.equal(found[1:3].clone(), numbers[1:3])
        assert torch.equal(found.T[:2].clone(), numbers.T[:2])
        assert all(isinstance(part, Paged) for part in found.split(4))


def test_what_is_made_lies_where_its_source_does(no_room: object) -> None:
    source, made = (
        Paged(copy_to_file(torch.ones(2, 2).bfloat16()).stored, torch.float32),
        torch.rand(3),
    )
    kept = store_like(source, made)
    assert isinstance(kept, Paged)
    assert torch.equal(kept.clone(), made.bfloat16().float())
    assert store_like(torch.ones(2), made) is made
    codes = store_like(source, torch.arange(5, dtype=torch.uint8))
    assert torch.equal(codes.clone(), torch.arange(5, dtype=torch.uint8))
    assert list(paged.default_cache_dir().rglob("*")) == [paged.default_cache_dir() / "scratch"]


def test_a_full_disk_is_said(no_room: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    no_room.setattr(paged.os, "posix_fallocate", full)
    with pytest.raises(WakefulError, match="WAKEFUL_CACHE"):
        copy_to_file(torch.ones(2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "auto"])
def test_a_model_runs_alike(folder: Path, dtype: str, no_room: pytest.MonkeyPatch) -> None:
    if dtype == "bfloat16" and "bfloat16" not in (folder / "config.json").read_text("utf-8"):
        pytest.skip("narrower than what is stored")
    inside, found = both(folder, no_room, dtype=dtype)
    assert torch.equal(inside.logits(TOKENS), found.logits(TOKENS))
    assert torch.equal(inside.decoder()(TOKENS), found.decoder()(TOKENS))


@pytest.mark.slow
def test_memory_holds_one_matrix(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({f"{n}.weight": torch.rand(1024, 1024) for n in range(8)}, file)
    with safe_open(file, "pt") as tensors, torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(8)))
        model.load_state_dict(
            {name: tensors.get_tensor(name) for name in model.state_dict()}, assign=True
        )
    page_matrices(model, torch.float64)
    seen: list[int] = []
    for layer in model:
        layer.register_forward_hook(lambda *_: seen.append(resident(file)))
    with torch.no_grad():
        model(torch.rand(2, 1024, dtype=torch.float64))
    assert len(seen) == 8
    assert max(seen) < 2 * 2**20  # of 32: what the system reads ahead
    assert sum(bool(each.isfinite().all()) for each in model.parameters()) == 8
    assert resident(file) < 2 * 2**20


def test_weights_in_files_count_as_they_are_stored(
    folder: Path, no_room: pytest.MonkeyPatch
) -> None:
    with Shards(folder) as tensors:
        stored = {name: each.numel() * each.element_size() for name, each in tensors.items()}
        vectors = sum(4 * each.numel() for each in tensors.values() if each.ndim == 1)
        matrices = sum(stored[name] for name, each in tensors.items() if each.ndim > 1)
    inside, found = both(folder, no_room)
    assert held_bytes(found.module.parameters()) == matrices + vectors
    assert held_bytes(inside.module.parameters()) == 4 * inside.module.num_parameters()


@pytest.mark.skipif(sys.platform != "linux", reason="memory is told there")
def test_free_memory_is_given_back(no_room: object) -> None:
    def mine() -> int:
        told = Path("/proc/self/status").read_text("utf-8")
        return int(re.findall(r"RssAnon:\s+(\d+)", told)[0]) // 1024

    torch.ones(2**22).clone()  # after blocks of such a size, smaller ones come from one heap
    blocks, kept = [], []
    for _ in range(100):
        blocks.append(torch.ones(2**18))
        kept.append(torch.ones(2**10))
    full = mine()
    del blocks
    copy_to_file(torch.ones(2))
    assert mine() < full - 80  # MiB, of 100
    assert len(kept) == 100


def test_a_rotation_is_the_same_rounded_once(folder: Path, no_room: pytest.MonkeyPatch) -> None:
    inside, found = both(folder, no_room)
    expected, turned = rotate(inside.decoder(), inner=True), rotate(found.decoder(), inner=True)
    no_room.setattr(paged, "AT_ONCE", 100)
    parts = rotate(found.decoder(), inner=True)
    stored = next(iter(AutoModelForCausalLM.from_pretrained(folder).parameters())).dtype
    for name, parameter in expected.named_parameters():
        kind = stored if parameter.ndim > 1 else torch.float32
        for other in (turned, parts):
            each = other.get_parameter(name)
            assert isinstance(each, Paged) == (parameter.ndim > 1)
            assert torch.equal(each.clone(), parameter.to(kind).float()), name


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_quantized_layers_are_the_same(
    folder: Path, scheme: str, no_room: pytest.MonkeyPatch
) -> None:
    inside, found = both(folder, no_room)
    text = [TOKENS] if "smooth" in scheme or "gptq" in scheme else []
    expected = quantize_module(inside.module, scheme, calibration=text)
    no_room.setattr(paged, "AT_ONCE", 200)
    no_room.setattr("wakeful.quantization.arithmetic.AT_ONCE", 200)
    small = quantize_module(found.module, scheme, calibration=text)
    assert torch.equal(expected(TOKENS).logits, small(TOKENS).logits)
    with torch.inference_mode():
        assert torch.equal(expected(TOKENS).logits, small(TOKENS).logits)
    for name, layer in quantized_layers(small).items():
        assert isinstance(layer.integers, Paged)
        for part, buffer in quantized_layers(expected)[name].named_buffers():
            assert torch.equal(layer.get_buffer(part).clone(), buffer), (name, part)


@pytest.mark.slow
def test_verbs_give_the_same(folder: Path, tmp_path: Path, no_room: pytest.MonkeyPatch) -> None:
    """Diagnosed, rotated and written, quantized and written: figures and files."""
    text = tmp_path / "words.txt"
    text.write_text(TEXT, "utf-8")
    inside, found = both(folder, no_room, dtype="auto")
    read = {"text": str(text), "length": 16, "num_sequences": 2}
    for name, model in (("inside", inside), ("found", found)):
        place = tmp_path / name
        wakeful.cure(model, rotate="haar", out=str(place / "cured"), **read)
        wakeful.quantize(
            model,
            "w4a16(weights=absmax(bits=4, per='channel', group=32))",
            save=str(place / "small"),
            out=str(place / "damage"),
            **read,
        )
        wakeful.quantize(model, "fine", save=str(place / "fine"))
    for kind in ("cured", "small", "fine"):
        files = [tmp_path / name / kind / "model.safetensors" for name in ("inside", "found")]
        assert files[0].read_bytes() == files[1].read_bytes(), kind
    frames = [wakeful.diagnose(model, **read).frame for model in (inside, found)]
    polars.testing.assert_frame_equal(*frames, check_exact=True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_finite_is_what_torch_calls_so(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged, "AT_ONCE", 20)
    largest = torch.full((7, 9), torch.finfo(dtype).max, dtype=dtype)
    assert is_finite(largest)
    for bad in (torch.nan, torch.inf, -torch.inf):
        tensor = torch.rand(7, 9).to(dtype)
        assert is_finite(tensor)
        tensor[4, 2] = bad
        assert not is_finite(tensor)
        tensor[6, 8] = -bad
        assert not is_finite(tensor)
        assert not is_finite(tensor[4])
    assert is_finite(torch.ones((), dtype=dtype))
    assert is_finite(torch.ones(0, 3, dtype=dtype))
