"""Models whose weights are zero, or whose outputs are not finite: a line or a right figure."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import wakeful
from evaluation.models import save_llama
from inheritance.references import SMALL
from wakeful.cli import main
from wakeful.errors import WakefulError
from wakeful.hf.gguf_header import read_gguf_header
from wakeful.loading.load import load
from wakeful.loading.model import Model
from wakeful.surgery import choose_sink_tokens, learned_sinks, rotate

NOT_FINITE = "the model's outputs are not finite: it is damaged, or needs dtype float32 or float64"
ALIKE = "gives every token the same logit"
READ: dict[str, Any] = {"length": 16, "num_sequences": 2, "device": "cpu"}
VERBS: dict[str, Callable[..., object]] = {
    "diagnose": lambda model, text: wakeful.diagnose(model, text=text, **READ),
    "evaluate": lambda model, text: wakeful.evaluate(model, text=text, **READ),
    "greedy": lambda model, _: wakeful.generate(model, "a", num_tokens=4, temperature=0.0),
    "drawn": lambda model, _: wakeful.generate(model, "a", num_tokens=4),
    "cut": lambda model, _: wakeful.generate(model, "a", num_tokens=4, top_k=5, top_p=0.9),
    "rotate": lambda model, text: wakeful.cure(model, text=text, rotate="hadamard", **READ),
    "inner": lambda model, text: wakeful.cure(model, text=text, rotate_inner=True, **READ),
    "bos": lambda model, text: wakeful.cure(model, text=text, prefix="bos", **READ),
    "prefix": lambda model, text: wakeful.cure(model, text=text, prefix="auto", **READ),
    "sinks": lambda model, text: wakeful.cure(model, text=text, sinks=True, **READ),
}


def model(folder: Path, change: Callable[[nn.Module], object], dtype: torch.dtype) -> Model:
    """Return a small Llama, changed, as it is kept in memory."""
    found = load(str(save_llama(folder)), device="cpu")
    with torch.no_grad():
        change(found.module)
    found.module.to(dtype)
    return found


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text("a quick brown fox jumps over the lazy dog; " * 40)
    return str(path)


def overflow(module: nn.Module) -> None:
    """Make block 0 overflow in half precision, and no weight of it."""
    for name in ("gate", "up", "down"):
        module.get_parameter(f"model.layers.0.mlp.{name}_proj.weight").mul_(300)


def infinite(module: nn.Module) -> None:
    module.get_parameter("lm_head.weight").mul_(1e38)


def zero(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.zero_()


def some_zero(module: nn.Module) -> None:
    """Take away what layer 0 attends by, and all that layer 1 puts out."""
    for name in ("0.input_layernorm", "1.self_attn.o_proj", "1.mlp.down_proj"):
        module.get_parameter(f"model.layers.{name}.weight").zero_()


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("change", "dtype"), [(overflow, torch.float16), (infinite, torch.float32)]
)
def test_outputs_that_are_not_finite_are_one_line(
    verb: str, change: Callable, dtype: torch.dtype, text: str, tmp_path: Path
) -> None:
    broken = model(tmp_path / "llama", change, dtype)
    with pytest.raises(WakefulError) as caught:
        VERBS[verb](broken, text)
    assert str(caught.value) == NOT_FINITE or (
        verb == "diagnose" and "loss is not finite" in str(caught.value)
    )


@pytest.mark.parametrize("verb", VERBS)
def test_a_model_of_zeros_is_measured_and_not_cured(verb: str, text: str, tmp_path: Path) -> None:
    broken = model(tmp_path / "llama", zero, torch.float32)
    if verb in ("diagnose", "evaluate", "greedy", "drawn", "cut"):
        VERBS[verb](broken, text)
    else:
        with pytest.raises(WakefulError, match=ALIKE):
            VERBS[verb](broken, text)


def test_the_perplexity_of_zeros_is_the_vocabulary(text: str, tmp_path: Path) -> None:
    broken = model(tmp_path / "llama", zero, torch.float32)
    (found, *_) = wakeful.evaluate(broken, text=text, **READ).scores
    assert found.figure == pytest.approx(258)


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_layers_of_zeros_are_no_obstacle(verb: str, text: str, tmp_path: Path) -> None:
    VERBS[verb](model(tmp_path / "llama", some_zero, torch.float32), text)


def test_parts_alone_bear_zeros(tmp_path: Path) -> None:
    decoder = model(tmp_path / "llama", zero, torch.float32).decoder()
    tokens = torch.arange(32).view(2, 16)
    assert choose_sink_tokens(decoder, tokens, [3, 4]).token.tokens == (3,)
    assert rotate(decoder, "hadamard")(tokens).abs().max() == 0
    assert learned_sinks(decoder, 3, tokens)(tokens).abs().max() == 0


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_model_is_cured_as_it_computes(
    dtype: torch.dtype, text: str, tmp_path: Path
) -> None:
    half = model(tmp_path / "llama", lambda module: module, dtype)
    close = 0.02 if dtype == torch.float16 else 0.1
    for cure in ({"rotate": "hadamard"}, {"prefix": "bos"}, {"rotate_inner": True}):
        out = tmp_path / next(iter(cure))
        name = str(dtype).removeprefix("torch.")
        cured = wakeful.cure(half, text=text, out=str(out), stored=name, **cure, **READ)
        assert cured.difference.relative < close
        kinds = {tensor.dtype for tensor in load_file(out / "model.safetensors").values()}
        assert kinds == {dtype}
        told = json.loads((out / "cure.json").read_text())["difference"]
        assert all(map(math.isfinite, told.values()))


@pytest.mark.parametrize("storage", ["f16", "q8_0", "q4_0"])
def test_what_half_precision_cannot_hold_is_not_written(storage: str, tmp_path: Path) -> None:
    def large(module: nn.Module) -> None:
        module.get_parameter("lm_head.weight")[3, 5] = 1e8

    folder = tmp_path / "large"
    made = model(tmp_path / "llama", large, torch.float32)
    made.module.save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    made.save_tokenizer(folder)
    out = tmp_path / "out.gguf"
    with pytest.raises(WakefulError, match=r"output\.weight has a value past 65,504"):
        wakeful.export(folder, out, gguf=storage)
    assert not out.exists()
    wakeful.export(folder, out, gguf="f32")
    assert "output.weight" in read_gguf_header(out).tensors
    with pytest.raises(WakefulError, match=r"lm_head\.weight has a value .* in float16"):
        wakeful.export(folder, tmp_path / "half", dtype="float16")
    assert not (tmp_path / "half").exists()


def test_a_reference_that_is_not_finite_has_no_heir(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    lines = "".join(f"{n} {n * n} {n**3} {n**4}\n" for n in range(4000))
    Path(text).write_text(lines)
    folder = tmp_path / "infinite"
    made = model(tmp_path / "llama", infinite, torch.float32)
    made.module.save_pretrained(folder)  # pyright: ignore[reportCallIssue]
    made.save_tokenizer(folder)
    out = tmp_path / "out"
    options = ["--text", text, "--out", str(out), "--steps", "2", *SMALL]
    assert main(["inherit", str(folder), *options]) == 1
    assert NOT_FINITE in capsys.readouterr().err
    assert not out.exists()
