"""What every writer owes: what it leaves is read back as the model, or it leaves nothing."""

import importlib
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import wakeful
from wakeful.cli import main
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError, WakefulWarning
from wakeful.hf import gguf_out, weights_out

loading = importlib.import_module("wakeful.loading.load")  # whose name a function has, too
reading = importlib.import_module("wakeful.hf.read_back")
read_back = reading.read_back

TOKENS = torch.randint(250, (2, 40), generator=torch.Generator().manual_seed(0))
SHAPE = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "initializer_range": 0.2,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(["a quick brown fox jumps over a lazy dog " * 40], vocab_size=270)


@pytest.fixture
def text(tmp_path: Path) -> str:
    words = random.Random(0).choices(["a", "quick", "brown fox", "jumps over", "lazy"], k=900)
    (tmp_path / "text.txt").write_text(" ".join(words), "utf-8")
    return str(tmp_path / "text.txt")


def llama(vocab_size: int, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=vocab_size, **(SHAPE | changes))).eval()


def saved(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> Path:
    model.save_pretrained(folder)
    tokenizer.save(folder)
    return folder


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    found = model(TOKENS, **({"use_cache": False} if hasattr(model, "generate") else {}))
    return getattr(found, "logits", found)


def by_transformers(folder: Path) -> Tensor:
    read, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    return logits_of(read)


Writer = Callable[[Any, Path, str], Any]
VERBS: dict[str, Writer] = {
    "export": lambda model, out, text: wakeful.export(model, out),
    "export gguf": lambda model, out, text: wakeful.export(model, out.with_suffix(".gguf")),
    "cure": lambda model, out, text: wakeful.cure(
        model, rotate="hadamard", text=text, num_sequences=2, length=32, out=str(out)
    ),
    "inherit": lambda model, out, text: wakeful.inherit(
        model, layers=2, heal={"by": "none"}, text=text, length=32,
        out=str(out),
    ),
    "quantize": lambda model, out, text: wakeful.quantize(model, "w8a8", save=str(out)),
}  # fmt: skip
"""All that write a model."""


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_what_cannot_be_read_back_is_not_left(
    verb: str, tokenizer: Tokenizer, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wakeful.load(saved(llama(270), tokenizer, tmp_path / "model"))
    before = sorted(tmp_path.iterdir())

    def damaged(self: Any, *_: object, **__: object) -> None:
        raise RuntimeError("no such weights")

    monkeypatch.setattr(reading, "last_logits", damaged)
    why = r"is removed, as reading it back failed: .*no such weights"
    with pytest.raises(WakefulError, match=why):
        VERBS[verb](model, tmp_path / "out", text)
    assert sorted(tmp_path.iterdir()) == before
    monkeypatch.undo()
    VERBS[verb](model, tmp_path / "out", text)
    assert len(sorted(tmp_path.iterdir())) == len(before) + 1


def test_another_model_is_refused_and_a_difference_is_said(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(llama(270), tokenizer, tmp_path / "model")
    decoder = wakeful.load(llama(270), tokenizer=tokenizer).decoder()
    read_back(folder, decoder, tokenizer=tokenizer)
    file, whole = folder / "model.safetensors", load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"

    def write(tensors: dict[str, Tensor]) -> None:
        file.unlink()  # whose pages the model may still be
        save_file(tensors, file, {"format": "pt"})

    write(whole | {name: whole[name] * 1.05})
    with pytest.warns(WakefulWarning, match=r"its logits differ by [1-9][\d.]*% .* explains 0.00%"):
        read_back(folder, decoder, tokenizer=tokenizer)
    write({each: torch.randn_like(tensor) for each, tensor in whole.items()})
    with pytest.raises(WakefulError, match="logits are those of another model"):
        read_back(folder, decoder)
    write({each: tensor for each, tensor in whole.items() if each != name})
    with pytest.raises(WakefulError, match=f"no tensor {name}"):
        read_back(folder, decoder)
    write(whole)
    other = Tokenizer.train(["another text altogether " * 9], vocab_size=270)
    with pytest.raises(WakefulError, match="tokenizer gives other tokens"):
        read_back(folder, decoder, tokenizer=other)


@pytest.mark.slow
def test_rounding_explains_what_it_does(tokenizer: Tokenizer, tmp_path: Path) -> None:
    model = wakeful.load(llama(270), tokenizer=tokenizer)
    for dtype in ("bfloat16", "float16"):
        wakeful.export(model, tmp_path / dtype, dtype=dtype)  # a warning would be an error
        apart = by_transformers(tmp_path / dtype) - model.logits(TOKENS)
        assert float(apart.detach().abs().max()) > 1e-4
    for storage in ("f32", "f16", "q8_0", "q4_0"):
        wakeful.export(model, tmp_path / f"{storage}.gguf", gguf=storage)


def test_a_gguf_file_is_read_by_another_reader(
    tokenizer: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = wakeful.load(llama(270), tokenizer=tokenizer)
    # Without the conversion, the pairs of RoPE keep our order.
    monkeypatch.setattr(gguf_out, "convert_for_llama_cpp", lambda array, *_, **__: array)
    with pytest.raises(WakefulError, match="logits are those of another model"):
        wakeful.export(model, tmp_path / "wrong.gguf", gguf="f32")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_a_pad_token_beyond_the_embedding_is_said_and_not_written(
    verb: str, tokenizer: Tokenizer, text: str, tmp_path: Path
) -> None:
    more = Tokenizer.train(["a quick brown fox jumps over a lazy dog " * 40], vocab_size=270)
    more.inner.add_special_tokens(["[PAD]"])
    padded = Tokenizer(
        more.inner, end_of_text=more.inner.id_to_token(more.end_of_text),
        companion_files=more.companion_files
        | {"tokenizer_config.json": json.dumps({"pad_token": "[PAD]"})},
    )  # fmt: skip
    assert padded.pad == 270
    folder = tmp_path / "model"
    llama(270).save_pretrained(folder)
    padded.save(folder)
    model, out = wakeful.load(folder), tmp_path / "out"
    model.module.config.pad_token_id = 270  # pyright: ignore
    if verb == "inherit":
        with pytest.raises(WakefulError, match="tokenizer has 271 tokens and its embedding 270"):
            VERBS[verb](model, out, text)
        return
    said = r"pad_token_id = 270 is not written: .* 270 tokens"
    with pytest.warns(WakefulWarning, match=said):
        VERBS[verb](model, out, text)
    if verb == "quantize":
        assert wakeful.load(out).logits(TOKENS).isfinite().all()
    elif verb != "export gguf":
        table = json.loads((out / "config.json").read_text("utf-8"))
        assert table.get("pad_token_id") is None
        assert by_transformers(out).isfinite().all()


def mixed(folder: Path) -> dict[str, Tensor]:
    """Store matrices in bfloat16 and norms in float32; return the tensors."""
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if "norm" in name:
            tensors[name] = 1 + 0.3 * torch.randn(tensor.shape)
        else:
            tensors[name] = tensor.bfloat16()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    table = json.loads((folder / "config.json").read_text("utf-8")) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(table), "utf-8")
    return tensors


@pytest.mark.slow
def test_weights_keep_their_types(
    tokenizer: Tokenizer, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(llama(270), tokenizer, tmp_path / "model")
    before = mixed(folder)
    expected = by_transformers(folder)
    for dtype in ("auto", torch.float32):
        torch.testing.assert_close(wakeful.load(folder, dtype=dtype).logits(TOKENS), expected)
    monkeypatch.setattr(loading, "free_memory", lambda device: 1)
    torch.testing.assert_close(wakeful.load(folder, dtype="auto").logits(TOKENS), expected)
    wakeful.export(folder, tmp_path / "paged")
    monkeypatch.undo()
    wakeful.export(folder, tmp_path / "exported")
    wakeful.cure(
        folder, rotate_values=True, text=text, num_sequences=2, length=32,
        out=str(tmp_path / "cured"),
    )  # fmt: skip
    for name in ("paged", "exported", "cured"):
        after = load_file(tmp_path / name / "model.safetensors")
        assert {each: t.dtype for each, t in after.items()} == {
            each: t.dtype for each, t in before.items()
        }
        turned = ("v_proj", "o_proj") if name == "cured" else ()
        for each, tensor in after.items():
            if not any(part in each for part in turned):
                assert torch.equal(tensor, before[each])
    wakeful.inherit(
        folder, layers=2, heal={"by": "none"}, text=text, length=32,
        out=str(tmp_path / "heir"),
    )  # fmt: skip
    heir = load_file(tmp_path / "heir" / "model.safetensors")
    norms = [heir[name] for name in heir if "norm" in name]
    assert {each.dtype for each in norms} == {torch.float32}
    wakeful.export(folder, tmp_path / "short", dtype="bfloat16")
    short = load_file(tmp_path / "short" / "model.safetensors")
    assert {each.dtype for each in short.values()} == {torch.bfloat16}


@pytest.mark.slow
@pytest.mark.parametrize("shared", ["layer", "head"])
@pytest.mark.parametrize("verb", ["export", "cure", "quantize"])
def test_weights_that_share_memory(
    verb: str, shared: str, tokenizer: Tokenizer, text: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    module = llama(270, tie_word_embeddings=False)
    if shared == "layer":
        module.model.layers[2] = module.model.layers[0]
    else:
        module.lm_head.weight = module.model.embed_tokens.weight
    expected = logits_of(module)
    model, out = wakeful.load(module, tokenizer=tokenizer), tmp_path / "out"
    if (verb, shared) == ("cure", "layer"):  # what is cured is diagnosed; it is said before
        monkeypatch.setattr("wakeful.curing.tool._cure_decoder", None)
        with pytest.raises(WakefulError, match="one of its layers stands in several places"):
            VERBS[verb](model, out, text)
        assert not out.exists()
        return
    VERBS[verb](model, out, text)
    read = by_transformers(out).detach()
    close = 0.05 if verb == "quantize" else 1e-5
    assert float((read - expected).norm() / expected.norm()) < close
    torch.testing.assert_close(logits_of(module), expected, rtol=0, atol=0)


@pytest.mark.slow
def test_a_mixture_of_experts_is_read_back(tokenizer: Tokenizer, text: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=270, num_local_experts=4, num_experts_per_tok=2, pad_token_id=269, **SHAPE
    )
    module = MixtralForCausalLM(config).eval()
    module.config.pad_token_id = 270
    model = wakeful.load(module, tokenizer=tokenizer)
    with pytest.warns(WakefulWarning, match="pad_token_id = 270 is not written"):
        VERBS["cure"](model, tmp_path / "out", text)
    apart = by_transformers(tmp_path / "out") - logits_of(module)
    assert float(apart.abs().max()) < 1e-4


def test_the_command_line_prints_a_warning_as_one_line(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = saved(llama(270), tokenizer, tmp_path / "model")
    write = weights_out.write_tensors

    def changed(tensors: dict[str, Tensor], *rest: Any) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        write(tensors | {name: tensors[name] * 1.05}, *rest)

    monkeypatch.setattr(weights_out, "write_tensors", changed)
    assert main(["export", str(folder), str(tmp_path / "out")]) == 0
    errors = capsys.readouterr().err
    assert errors.count("warning: read back, its logits differ by") == 1
    assert "UserWarning" not in errors
