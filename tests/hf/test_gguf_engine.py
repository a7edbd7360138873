"""llama.cpp computes what we compute from the files we write (`pip install xllamacpp`)."""

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_models import FAMILIES, TEXTS, decoder, sentencepiece

from wakeful.data.tokenizer import Tokenizer
from wakeful.hf.gguf_out import export_gguf
from wakeful.model.decoder import Decoder

engine: Any = pytest.importorskip("xllamacpp", reason="llama.cpp is absent: pip install xllamacpp")
FORCED = "a"
"""What is generated, since half a character is given no probabilities."""


def likelihoods(path: Path, prompt: str | list[int], count: int, forced: int) -> torch.Tensor:
    """Return llama.cpp's log-probabilities of the token that follows."""
    options = engine.CommonParams()
    options.model.path = str(path)
    options.n_ctx, options.n_parallel, options.warmup, options.verbosity = 64, 1, False, 0
    options.cache_type_k = options.cache_type_v = engine.ggml_type.GGML_TYPE_F32
    options.flash_attn_type = engine.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    reply = engine.Server(options).handle_completions(
        {"prompt": prompt, "n_predict": 1, "n_probs": count, "logit_bias": [[forced, 1000.0]]}
    )
    found = reply["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    table = {each["id"]: each["logprob"] for each in found}
    return torch.tensor([table[token] for token in range(count)])


@torch.no_grad()
def ours(made: Decoder, tokens: list[int]) -> torch.Tensor:
    return torch.log_softmax(made(torch.tensor([tokens]))[0, -1], -1)


@pytest.mark.parametrize("family", FAMILIES)
def test_llama_cpp_computes_the_same(family: str, tmp_path: Path) -> None:
    kind, changes = FAMILIES[family]
    tokenizer = Tokenizer.train(TEXTS, vocab_size=270)
    made = decoder(tokenizer.vocab_size, **changes)
    path = tmp_path / "m.gguf"
    export_gguf(made, path, tokenizer=tokenizer, storage="f32", name="a model")
    tokens = torch.randint(1, 270, (20,), generator=torch.Generator().manual_seed(1)).tolist()
    forced = tokenizer.encode(FORCED)[-1]
    found = likelihoods(path, tokens, tokenizer.vocab_size, forced)
    # llama.cpp looks GELU up in a table of half precision.
    limit = 1e-2 if kind.startswith("g") else 5e-5
    torch.testing.assert_close(found, ours(made, tokens), rtol=0, atol=limit)


@pytest.mark.parametrize("kind", ["bytes", "llama", "gemma"])
@pytest.mark.parametrize(
    "text", ["a quick dog", " a  quick\ndog \u00e9\u2713 quiz", "zig dogdog\n\n"]
)
def test_llama_cpp_cuts_text_as_we_do(kind: str, text: str, tmp_path: Path) -> None:
    made = (
        Tokenizer.train(TEXTS, vocab_size=270)
        if kind == "bytes"
        else sentencepiece(prefix=kind == "llama")
    )
    model = decoder(made.vocab_size)
    path = tmp_path / "m.gguf"
    export_gguf(model, path, tokenizer=made, storage="f32", name="a model")
    first = [] if made.bos is None else [made.bos]
    found = likelihoods(path, text, made.vocab_size, made.encode(FORCED)[-1])
    expected = ours(model, first + made.encode(text))
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)
