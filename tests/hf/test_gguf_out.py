"""A GGUF file holds the model: read back by gguf, by Transformers and by us."""

import dataclasses
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_models import FAMILIES, GEMMA, GEMMA2, GPT2, TEXTS, decoder, sentencepiece
from tokenizers import AddedToken, Regex, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Inner
from tokenizers import models as kinds
from transformers import AutoTokenizer, MixtralConfig, MixtralForCausalLM

import wakeful
from helpers import since
from wakeful.data.tokenizer import Tokenizer
from wakeful.errors import WakefulError
from wakeful.hf.checkpoint_reader import _check_gguf_rope, load_hf_model
from wakeful.hf.gguf_architectures import gguf_architecture
from wakeful.hf.gguf_header import GGUFHeader, GGUFTensor
from wakeful.hf.gguf_out import export_gguf
from wakeful.hf.gguf_tokens import gguf_tokenizer_fields
from wakeful.loading.load import read_decoder

TRANSFORMERS = (
    "llama", "mistral", "qwen2", "qwen3", "gpt2", "gemma2, as made", "gemma3, as made"
)  # fmt: skip
"""Whose files Transformers reads; it leaves out or guesses what sets the others apart."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(TEXTS, vocab_size=270)


@since("5.19", "it reads tokenizers of Llamas and Gemmas in GGUF files")
@torch.no_grad()
@pytest.mark.parametrize("family", TRANSFORMERS)
def test_transformers_reads_the_same_model(
    family: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    kind, changes = FAMILIES[family]
    made = decoder(tokenizer.vocab_size, **changes)
    path = tmp_path / "model.gguf"
    assert export_gguf(made, path, tokenizer=tokenizer, storage="f32") == kind
    read = load_hf_model(tmp_path, dtype=torch.float32, gguf=path.name)
    tokens = torch.arange(20).view(1, 20)
    torch.testing.assert_close(read(tokens).logits, made(tokens), rtol=1e-4, atol=1e-4)
    words, text = AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name), "a quick brown dog"
    assert words.encode(text) == tokenizer.encode(text)
    assert words.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_written_is_read_back(family: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    kind, changes = FAMILIES[family]
    for number, more in enumerate(OTHERS.get(kind, [{}])):
        made = decoder(tokenizer.vocab_size + 7, **(changes | more))
        path = tmp_path / f"{number}.gguf"
        export_gguf(made, path, tokenizer=tokenizer, storage="f32")
        tokens = torch.arange(20).view(1, 20)
        for model in (wakeful.load(path), read_decoder(path)):
            torch.testing.assert_close(model.logits(tokens), made(tokens), rtol=1e-5, atol=1e-5)
            assert model.wakeful_tokenizer.fingerprint == tokenizer.fingerprint
            assert model.context == gguf_architecture(made.config)[1].context
        if kind != "gpt2":
            assert read_decoder(path, max_length=16).context == 16
        again = tmp_path / f"{number} again.gguf"
        wakeful.export(path, again, gguf="f32")
        torch.testing.assert_close(
            wakeful.load(again).logits(tokens), made(tokens), rtol=1e-5, atol=1e-5
        )


OTHERS = {
    "llama": [{}, {"num_kv_heads": 1, "width": 60, "head_width": 20}],
    "gpt2": [{}, {"max_length": 64, "mlp_width": 96, "tied": False}],
    "qwen3": [{}, {"head_width": 16, "tied": True}],
}  # fmt: skip
"""What families have that Transformers' reader does not expect."""


def test_what_a_file_says_of_itself_is_checked(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    export_gguf(decoder(tokenizer.vocab_size), path, tokenizer=tokenizer)
    data = path.read_bytes()
    for old, new, message in (
        (b'"num_layers": 2', b'"num_layers": 3', r"no tensor model\.layers\.2\."),
        (b'"mlp_width": 96', b'"mlp_width": 98', "the configuration makes it"),
        (b'{"vocab_size"', b'["vocab_size"', "wakeful.model holds no JSON object"),
        (b'"route": "own"', b'"route": "cla"', "no architecture that a GGUF file holds"),
        (b'"tokenizer.json"', b'"../../her.json"', "not a tokenizer's"),
    ):
        assert data.count(old) == 1, old
        path.write_bytes(data.replace(old, new))
        with pytest.raises(WakefulError, match=message):
            wakeful.load(path)


@torch.no_grad()
@pytest.mark.parametrize(("storage", "bits"), [("f16", 16.0), ("q8_0", 8.5), ("q4_0", 4.5)])
def test_matrices_are_stored_as_asked(
    storage: str, bits: float, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    made = decoder(tokenizer.vocab_size)
    path = tmp_path / "model.gguf"
    export_gguf(made, path, tokenizer=tokenizer, storage=storage)  # pyright: ignore
    tensors = {each.name: each for each in gguf.GGUFReader(path).tensors}
    down = tensors["blk.0.ffn_down.weight"]
    assert down.n_bytes * 8 / down.n_elements == bits
    assert tensors["blk.0.attn_norm.weight"].tensor_type == gguf.GGMLQuantizationType.F32
    expected = {"f16": "F16", "q8_0": "Q8_0", "q4_0": "Q8_0"}[storage]
    assert tensors["token_embd.weight"].tensor_type.name == expected
    numbers = gguf.quants.dequantize(down.data, down.tensor_type)
    weight = made.get_parameter("blocks.0.mlp.down.weight").detach().numpy()
    step = {"f16": 1e-3, "q8_0": 1 / 127, "q4_0": 1 / 7}[storage]
    assert np.abs(numbers - weight).max() <= step * np.abs(weight).max()
    loss = (
        wakeful.load(path).logits(torch.arange(20).view(1, 20)) - made(torch.arange(20).view(1, 20))
    ).std()
    assert (
        loss
        < {"f16": 1e-2, "q8_0": 0.1, "q4_0": 1.0}[storage]
        * made(torch.arange(20).view(1, 20)).std()
    )


def test_rows_that_are_not_whole_blocks_stay_halves(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    export_gguf(
        decoder(tokenizer.vocab_size, mlp_width=40), path, tokenizer=tokenizer, storage="q8_0"
    )
    types = {each.name: each.tensor_type.name for each in gguf.GGUFReader(path).tensors}
    assert types["blk.0.ffn_down.weight"] == "F16"
    assert types["blk.0.ffn_up.weight"] == "Q8_0"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"normalizer": "softmax1", "qk_norm": True},
         "is a wakeful .model.normalizer = softmax1"),
        pytest.param(
            {"normalizer": "softmax1", "local_layers": (0,), "local_theta": 100.0},
            "model.local_theta", marks=since("5.15", "it has Granite SWA"),
        ),
        ({"route": "svformer"}, "is a wakeful .model.route = svformer"),
        ({"rope": "llama3(factor=8.0, original_length=8192)", "qk_norm": True}, "model.rope"),
        ({"attention_bias": "all"}, "attention_bias"),
        ({"attention_bias": "all", "qk_norm": True}, "attention_bias"),
        ({"local_layers": (0,)}, r"model.local_layers = \[0\]: .* smollm3, here as \[\]"),
        ({**GPT2, "mlp": "gelu_exact"}, "gelu_exact"),
        ({**GPT2, "scale_logits_by_layer": True}, "scale_logits_by_layer"),
        ({**GEMMA2, "tied": False}, "model.tied"),
        ({**GEMMA2, "logit_cap": 0.0}, "model.logit_cap"),
        ({**GEMMA, "qk_norm": True, "logit_cap": 30.0, "local_layers": (0, 1),
          "local_theta": 1e4}, "model.logit_cap"),
        ({**GEMMA, "qk_norm": True, "local_layers": (0,), "local_theta": 1e4},
         r"model.local_layers = \[0\]: .* gemma3_text, here as \[0, 1\]"),
        ({**GEMMA, "qk_norm": True, "local_layers": (0, 1), "local_theta": 2e4},
         "model.local_theta"),
        ({**GPT2, "mlp": "gelu_exact", "positions": "rotary", "parallel": True, "tied": False},
         "gpt_neox"),
    ],
)  # fmt: skip
def test_what_a_file_cannot_hold_is_refused(
    changes: dict[str, object], word: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    with pytest.raises(WakefulError, match=word):
        export_gguf(
            decoder(tokenizer.vocab_size, **changes), tmp_path / "m.gguf", tokenizer=tokenizer
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("family", "why"),
    [
        ("llama, llama3", "scaled"),
        ("llama, linear", "scaled"),
        ("phi3", "rotates 8 of a head's 16 channels"),
    ],
)
def test_positions_that_transformers_leaves_out_are_not_read(
    family: str, why: str, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "m.gguf"
    export_gguf(decoder(270, **FAMILIES[family][1]), path, tokenizer=tokenizer)
    with pytest.raises(WakefulError, match=f"m.gguf cannot be read: its RoPE .*{why}"):
        load_hf_model(tmp_path, dtype=torch.float32, gguf=path.name)


@pytest.mark.parametrize(
    ("kind", "turned", "tensor", "why"),
    [
        ("phi3", 96, "", ""),
        ("phi3", 96, "rope_factors_long.weight", "its RoPE is scaled"),
        ("phi3", 72, "", "its RoPE rotates 72 of a head's 96 channels"),
        ("stablelm", 24, "", ""),
        ("llama", 128, "", ""),
        ("mamba", None, "", ""),
    ],
)
def test_positions_are_known_where_a_file_does_not_say_how_wide_heads_are(
    kind: str, turned: int | None, tensor: str, why: str
) -> None:
    values: dict[str, Any] = {"general.architecture": kind, f"{kind}.embedding_length": 3072}
    if turned is not None:
        values |= {f"{kind}.attention.head_count": 32, f"{kind}.rope.dimension_count": turned}
    tensors = {tensor: GGUFTensor((48,), 0, 192)} if tensor else {}
    with pytest.raises(WakefulError, match=why) if why else nullcontext():
        _check_gguf_rope(GGUFHeader(values, {}, tensors), "m.gguf")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fields", "why"),
    [
        ("gemma2", {"head_width": 128}, "gemma2.attention.key_length is 128, .* assumes 256"),
        ("gemma2", {"logit_cap": 5.0}, "gemma2.final_logit_softcapping is 5.0, .* assumes 30"),
        (
            "gemma2",
            {"normalizer": "softcap(cap=3.0)"},
            "gemma2.attn_logit_softcapping is 3.0, .* assumes 50",
        ),
        ("gemma3", {"head_width": 128}, "gemma3.attention.key_length is 128, .* assumes 256"),
    ],
)
def test_what_transformers_assumes_of_a_gemma_is_refused_where_a_file_says_otherwise(
    tokenizer: Tokenizer, tmp_path: Path, family: str, fields: dict[str, object], why: str
) -> None:
    path = tmp_path / "m.gguf"
    usual = FAMILIES[f"{family}, as made"][1]
    scalar = {"query_scalar": fields["head_width"]} if "head_width" in fields else {}
    export_gguf(decoder(270, **usual | fields | scalar), path, tokenizer=tokenizer)
    with pytest.raises(WakefulError, match=f"m.gguf cannot be read: {why}"):
        load_hf_model(tmp_path, dtype=torch.float32, gguf=path.name)


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    config = MixtralConfig(
        vocab_size=270, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, num_local_experts=2,
    )  # fmt: skip
    MixtralForCausalLM(config).save_pretrained(tmp_path / "experts")
    with pytest.raises(WakefulError, match="cannot be a mixtral: it is a mixture of experts"):
        wakeful.export(tmp_path / "experts", tmp_path / "m.gguf")
    assert not (tmp_path / "m.gguf").exists()


def test_a_file_that_exists_stays(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.touch()
    with pytest.raises(WakefulError, match="exists"):
        export_gguf(decoder(tokenizer.vocab_size), path, tokenizer=tokenizer)
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("steps", "name"),
    [
        (pre_tokenizers.ByteLevel(add_prefix_space=False), "gpt-2"),
        (
            pre_tokenizers.Sequence(
                [
                    pre_tokenizers.Digits(individual_digits=True),
                    pre_tokenizers.ByteLevel(add_prefix_space=False),
                ]
            ),
            "smollm",
        ),
        (pre_tokenizers.Whitespace(), ""),
    ],
)
def test_how_text_is_cut_is_named(
    steps: pre_tokenizers.PreTokenizer, name: str, tmp_path: Path
) -> None:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: number for number, letter in enumerate([*letters, "<end>"])}
    inner = Inner(kinds.BPE(vocab=ids, merges=[]))
    inner.pre_tokenizer = steps
    made = Tokenizer(inner, end_of_text="<end>")
    path = tmp_path / "m.gguf"
    if not name:
        with pytest.raises(WakefulError, match="pre-tokenizer is unknown here"):
            export_gguf(decoder(made.vocab_size), path, tokenizer=made)
        return
    export_gguf(decoder(made.vocab_size), path, tokenizer=made)
    field = gguf.GGUFReader(path).fields["tokenizer.ggml.pre"]
    assert field.contents() == name


def test_other_ways_of_cutting_are_named_or_refused() -> None:
    llama3 = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tekken = (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
        r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    qwen2 = llama3.replace("{1,3}", "")
    named = [(llama3, True, "llama-bpe"), (llama3, False, "dbrx"), (tekken, True, "tekken"),
             (qwen2, False, "qwen2")]  # fmt: skip
    for pattern, whole, name in named:
        assert gguf_tokenizer_fields(split(pattern, whole), 257)["tokenizer.ggml.pre"] == name
    for pattern, whole in ((qwen2, True), (llama3.replace("{1,3}", "{1,2}"), False)):
        with pytest.raises(WakefulError, match="pre-tokenizer is unknown here"):
            gguf_tokenizer_fields(split(pattern, whole), 257)
    lower = split(qwen2, whole=False)
    lower.inner.normalizer = normalizers.Lowercase()
    with pytest.raises(WakefulError, match="pre-tokenizer is unknown here"):
        gguf_tokenizer_fields(lower, 257)


def split(pattern: str, whole: bool) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    ids = {letter: number for number, letter in enumerate([*letters, "<end>"])}
    inner = Inner(kinds.BPE(vocab=ids, merges=[], ignore_merges=whole))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return Tokenizer(inner, end_of_text="<end>")


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_goes_by_scores(prefix: bool, tmp_path: Path) -> None:
    made = sentencepiece(prefix=prefix)
    path = tmp_path / "m.gguf"
    export_gguf(decoder(made.vocab_size), path, tokenizer=made)
    fields = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    assert fields["tokenizer.ggml.model"] == "llama"
    assert fields["tokenizer.ggml.pre"] == "default"
    assert fields["tokenizer.ggml.add_space_prefix"] == prefix
    assert fields["tokenizer.ggml.unknown_token_id"] == 0
    assert (fields["tokenizer.ggml.bos_token_id"], fields["tokenizer.ggml.add_bos_token"]) == (1, 1)
    tokens, scores = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.scores"]
    order = sorted(range(259, 267), key=lambda token: -scores[token])
    assert [tokens[token] for token in order[:3]] == ["\u2581a", "qu", "\u2581qu"]
    assert min(scores[259:267]) > max(scores[267:])  # what is merged, before single letters
    types = [gguf.TokenType(number).name for number in fields["tokenizer.ggml.token_type"]]
    assert types[:3] == ["UNKNOWN", "CONTROL", "CONTROL"]
    assert set(types[3:259]) == {"BYTE"}
    assert set(types[259:]) == {"NORMAL"}


@pytest.mark.parametrize(
    ("merges", "word"),
    [
        ([("a", "b"), ("b", "c"), ("a", "bc")], "'ab' and 'c' are not merged"),
        ([("ab", "c"), ("b", "c"), ("a", "b"), ("a", "bc")], "take turns"),
    ],
)
def test_merges_that_scores_cannot_say_are_refused(
    merges: list[tuple[str, str]], word: str
) -> None:
    tokens = ["</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "c", "ab", "bc", "abc"]
    ids = {token: number for number, token in enumerate(tokens)}
    inner = Inner(kinds.BPE(vocab=ids, merges=merges, byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", "\u2581")
    with pytest.raises(WakefulError, match=word):
        gguf_tokenizer_fields(Tokenizer(inner, end_of_text="</s>"), len(tokens))


@pytest.mark.slow
def test_a_file_says_what_its_architecture_needs(tokenizer: Tokenizer, tmp_path: Path) -> None:
    needed = {
        "context_length", "embedding_length", "block_count", "feed_forward_length",
        "attention.head_count", "attention.head_count_kv", "vocab_size",
    }  # fmt: skip
    rotary = {"rope.dimension_count", "rope.freq_base", "attention.key_length",
              "attention.value_length"}  # fmt: skip
    more: dict[str, dict[str, object]] = {
        "llama, linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
        "mistral": {"context_length": 24},
        "qwen2, windows": {"context_length": 30},
        "phi3": {"rope.dimension_count": 8, "rope.scaling.original_context_length": 64},
        "phi3, windows": {"context_length": 24, "rope.scaling.original_context_length": 24},
        "olmo2, tied": {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
        "gemma2, windows": {"context_length": 64, "attention.sliding_window": 8},
        "gemma2, other windows": {"context_length": 24, "attention.sliding_window": 24},
        "granite": {"embedding_scale": 8.0, "attention.scale": np.float32(40**-0.5)},
        "granite_swa": {
            "attention.sliding_window": 64, "attention.sliding_window_pattern": [True, False],
            "residual_scale": 1.0, "logit_scale": 1.0, "attention.scale": 0.25,
        },
        "granite_swa, windows": {
            "attention.sliding_window": 8, "attention.sliding_window_pattern": [False, True],
        },
        "granite_swa, no positions": {"attention.rope_pattern": [False, True]},
        "gemma3": {
            "attention.sliding_window": 8, "attention.key_length": 32, "rope.freq_base": 1e6,
            "rope.scaling.type": "linear", "rope.scaling.factor": 8.0,
        },
    }  # fmt: skip
    for family, (kind, changes) in FAMILIES.items():
        path = tmp_path / f"{family}.gguf"
        assert export_gguf(decoder(270, **changes), path, tokenizer=tokenizer) == kind
        reader = gguf.GGUFReader(path)
        name = {"gemma3_text": "gemma3"}.get(kind, kind)
        assert reader.fields["general.architecture"].contents() == name
        found = {
            key.removeprefix(f"{name}."): field.contents() for key, field in reader.fields.items()
        }
        norm = "" if kind == "gpt2" else "rms_"
        wanted = needed | {f"attention.layer_norm_{norm}epsilon"}
        wanted |= set() if kind == "gpt2" else rotary
        if kind == "gemma2":
            wanted |= {"attn_logit_softcapping", "final_logit_softcapping"}
        assert wanted <= found.keys(), family
        for key, value in more.get(family, {}).items():
            assert found[key] == value, (family, key)
        tensors = {tensor.name for tensor in reader.tensors}
        assert ("rope_freqs.weight" in tensors) == ("llama3" in str(changes)), family
        untied = "output.weight" in tensors
        assert untied == (not changes.get("tied") or kind == "olmo2"), family


def test_a_file_names_what_its_weights_come_from(tokenizer: Tokenizer, tmp_path: Path) -> None:
    module = decoder(tokenizer.vocab_size)
    model = dataclasses.replace(wakeful.load(module, tokenizer=tokenizer), name="some/model")
    wakeful.export(model, tmp_path / "whole.gguf")
    lineage = "Made from some/model, whose license holds here too."
    export_gguf(
        module, tmp_path / "made.gguf", tokenizer=tokenizer, lineage=lineage, origin="some/model"
    )
    whole, first = (
        {key: field.contents() for key, field in gguf.GGUFReader(tmp_path / file).fields.items()}
        for file in ("whole.gguf", "made.gguf")
    )
    assert not [key for key in whole if "base_model" in key]
    assert whole["general.description"] == f"Written by wakeful {wakeful.__version__}."
    assert whole["general.tags"] == ["wakeful", "text-generation"]
    assert first["general.base_model.0.name"] == "model"
    assert first["general.base_model.0.organization"] == "some"
    assert first["general.base_model.0.repo_url"] == "https://huggingface.co/some/model"
    assert first["general.description"].startswith("Made from some/model, whose license holds here")
    tokens = torch.arange(9).view(1, 9)
    with torch.no_grad():  # as matrices are stored
        for parameter in module.parameters():
            if parameter.ndim == 2:
                parameter.copy_(parameter.half())
    read = wakeful.load(tmp_path / "whole.gguf")
    torch.testing.assert_close(read.logits(tokens), module(tokens), rtol=1e-4, atol=1e-4)


def test_llama3_divides_slow_frequencies_alone(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    rope = FAMILIES["llama, llama3"][1]
    export_gguf(decoder(270, **rope), path, tokenizer=tokenizer)
    tensors = {each.name: each for each in gguf.GGUFReader(path).tensors}
    factors = tensors["rope_freqs.weight"].data
    plain = 10_000.0 ** (-np.arange(0, 16, 2) / 16)
    turns = 8192 * plain / (2 * np.pi)
    assert (factors[turns > 4] == 1).all()
    np.testing.assert_allclose(factors[turns < 1], 8)
    between = (turns - 1) / 3
    expected = 1 / (between + (1 - between) / 8)
    middle = (turns > 1) & (turns < 4)
    assert middle.any()
    np.testing.assert_allclose(factors[middle], expected[middle], rtol=1e-6)


OPENED = processors.TemplateProcessing(
    single="<s> <x> $A", special_tokens=[("<s>", 257), ("<x>", 258)]
)
CLOSED = processors.TemplateProcessing(single="$A <x>", special_tokens=[("<x>", 258)])


@pytest.mark.parametrize(
    ("added", "processor", "ends", "why"),
    [
        (AddedToken("word", single_word=True), None, [1], "'word' that matches with single_word"),
        (AddedToken("<left>", lstrip=True), None, [1], "'<left>' that matches with lstrip"),
        (AddedToken("<right>", rstrip=True), None, [1], "'<right>' that matches with rstrip"),
        (None, OPENED, [1], r"the tokens \[257, 258\] before a text"),
        (None, CLOSED, [1], r"the tokens \[258\] after a text"),
        (None, None, [1, 2, 3], "4 tokens that end generation"),
    ],
)
def test_what_a_file_has_no_place_for_is_named(
    added: AddedToken | None, processor: Any, ends: list[int], why: str
) -> None:
    made = with_files(ends, processor, [] if added is None else [added])
    with pytest.raises(WakefulError, match=f"a GGUF file has no place for .*{why}"):
        gguf_tokenizer_fields(made, made.vocab_size)


def with_files(ends: list[int], processor: Any = None, added: Any = ()) -> Tokenizer:
    """Return a tokenizer with these ends of generation and two chat templates."""
    inner = Tokenizer.train(TEXTS, vocab_size=257).inner
    inner.add_special_tokens(["<s>", "<x>"])
    inner.add_tokens([*added])
    if processor is not None:
        inner.post_processor = processor
    templates = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    beside = {
        "tokenizer_config.json": json.dumps({"bos_token": "<s>", "chat_template": templates}),
        "generation_config.json": json.dumps({"eos_token_id": ends}),
    }
    return Tokenizer(inner, end_of_text="<|endoftext|>", companion_files=beside)


def test_what_phi_3_drops_behind_its_tokens_goes_by_its_name() -> None:
    tokens = [AddedToken(name, rstrip=True, special=True) for name in ("<|end|>", "<|user|>")]
    inner = Tokenizer.train(TEXTS, vocab_size=257).inner
    inner.add_special_tokens(tokens)
    made = Tokenizer(inner, end_of_text="<|endoftext|>")
    assert (
        gguf_tokenizer_fields(made, made.vocab_size, "Phi-3-mini")["tokenizer.ggml.model"] == "gpt2"
    )
    with pytest.raises(WakefulError, match="matches with rstrip"):
        gguf_tokenizer_fields(made, made.vocab_size, "another")


def test_a_file_has_all_ends_and_templates_and_says_what_is_put_around_a_text(
    tmp_path: Path,
) -> None:
    around = processors.TemplateProcessing(
        single="<s> $A <|endoftext|>", special_tokens=[("<s>", 257), ("<|endoftext|>", 0)]
    )
    made = with_files([257, 0, 258], around)
    path = tmp_path / "m.gguf"
    export_gguf(decoder(made.vocab_size), path, tokenizer=made)
    fields = gguf.GGUFReader(path).fields
    keys = ("eos_token_id", "eot_token_id", "eom_token_id", "add_bos_token", "add_eos_token")
    found = [fields[f"tokenizer.ggml.{key}"].contents() for key in keys]
    assert found == [0, 257, 258, True, True]
    assert fields["tokenizer.chat_template"].contents() == "a"
    assert fields["tokenizer.chat_template.tool_use"].contents() == "b"
