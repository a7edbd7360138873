"""Every folder that is written from a user's model tokenizes every text as that model's own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

import wakeful
from hf.tokenizers_of_all_kinds import KINDS, of_transformers
from wakeful.errors import WakefulError
from wakeful.inheritance.outcome import REFERENCE
from wakeful.loading.load import read_decoder
from wakeful.loading.model import Model

ENDS = [1, 3]
NASTY = [
    "", "a", "a b", " a", "a ", "  a  b\n\n\tc ", "ab abab", "Ab. isn't, x !", "12345 67",
    "<|im_end|>", "a<|im_end|>b", "a </s> b <s>", "<unk><pad>", "<mask> <mask>a", "plainab Norm",
    "word words norm", "x <left> y", "a   b    c", "é e\u0301 日本 😀", "\ufeff\u00a0\u3000x",
    "▁a ▁", "<0x41>",
]  # fmt: skip
SAID = [{"role": "user", "content": " a </s> b "}, {"role": "assistant", "content": "ab"}]


@pytest.fixture(params=KINDS)
def theirs(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """Return the folder of a model with a tokenizer of one of the kinds."""
    return saved(request.param, tmp_path / "theirs")


def saved(kind: str, folder: Path) -> Path:
    torch.manual_seed(0)
    tokenizer = of_transformers(kind)
    config = LlamaConfig(
        vocab_size=len(tokenizer) + 3, hidden_size=32, intermediate_size=32, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        eos_token_id=ENDS,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=ENDS, pad_token_id=4)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder.parent / "words.txt").write_text("a ab b x def ( ) . , " * 200, "utf-8")
    return folder


def exported(folder: Path, out: Path) -> Path:
    wakeful.export(folder, out)
    return out


def rotated(folder: Path, out: Path) -> Path:
    cure(folder, out, rotate="hadamard")
    return out


def with_a_prefix(folder: Path, out: Path) -> Path:
    cure(folder, out, prefix="bos")
    return out


def cure(folder: Path, out: Path, **kwargs: str) -> None:
    words = folder.parent / "words.txt"
    wakeful.cure(folder, text=words, length=16, num_sequences=2, device="cpu", out=out, **kwargs)


def quantized(folder: Path, out: Path) -> Path:
    wakeful.quantize(folder, "fine", save=str(out), device="cpu")
    return out


WRITERS: dict[str, Callable[[Path, Path], Path]] = {
    "export": exported, "rotate": rotated, "prefix": with_a_prefix, "quantize": quantized,
}  # fmt: skip


def check_the_same(folder: Path, written: Path, *, begun: bool) -> None:
    """Compare what Transformers reads in both; what is `begun` has no BOS in front."""
    ours, its = (AutoTokenizer.from_pretrained(each) for each in (written, folder))
    taken = int(begun and its.encode("a")[0] == its.bos_token_id)
    for text in NASTY:
        plain = its.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == plain, text
        assert ours.encode(text) == its.encode(text)[taken:], text
        for skip in (False, True):
            assert ours.decode(plain, skip_special_tokens=skip) == its.decode(
                plain, skip_special_tokens=skip
            )
    for name in ("default", "tool_use"):
        said = {"chat_template": name, "return_dict": False}
        expected = its.apply_chat_template(SAID, tokenize=False, **said)
        expected = expected.replace("<s>[", "[") if begun else expected
        assert ours.apply_chat_template(SAID, tokenize=False, **said) == expected
        assert ours.apply_chat_template(SAID, **said) == its.encode(
            expected, add_special_tokens=False
        )
    assert ours.special_tokens_map == its.special_tokens_map
    assert GenerationConfig.from_pretrained(written).eos_token_id == ENDS


def check_read_alike(one: Model, other: Model) -> None:
    for text in NASTY:
        ids = one.encode_plain(text)
        assert other.encode_plain(text) == ids, text
        assert other.encode_plain_with_ends(text) == one.encode_plain_with_ends(text), text
        assert not set(ids) & {0, 1, 3, 4}, text  # what a text spells is text
        assert other.decode(ids) == one.decode(ids), text
    assert one.ends == other.ends == set(ENDS)


@pytest.mark.slow
@pytest.mark.parametrize("writer", WRITERS)
def test_a_folder_holds_its_model_s_own_tokenizer(
    theirs: Path, writer: str, tmp_path: Path
) -> None:
    written = WRITERS[writer](theirs, tmp_path / "out")
    check_the_same(theirs, written, begun=writer == "prefix")
    before, after = wakeful.load(theirs, device="cpu"), None
    if writer != "compressed":
        after = wakeful.load(written, device="cpu")
        check_read_alike(before, after)


@pytest.mark.slow
@pytest.mark.parametrize("bos", ["auto", "off"])
@pytest.mark.parametrize("kind", ["Unigram", "two opening tokens"])
def test_an_heir_has_its_reference_s_tokens(
    kind: str, bos: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that never saw BOS begins no text with it."""
    monkeypatch.setenv("WAKEFUL_CACHE", str(tmp_path / "cache"))
    folder = saved(kind, tmp_path / "theirs")
    found = wakeful.inherit(
        folder, text=str(tmp_path / "words.txt"), blocks=[0, 2], steps=1, bos=bos, length=16,
        batch_size=2, device="cpu", out=tmp_path / "out",
    )  # fmt: skip
    before = wakeful.load(folder, device="cpu")
    check_read_alike(before, found.model)
    rest = before.start_tokens()[1:]
    assert before.bos == before.start_tokens()[0]
    assert found.model.start_tokens() == ([before.bos, *rest] if bos == "auto" else rest)
    (run,) = (tmp_path / "out").glob("heir-*")
    wakeful.export(run, tmp_path / "written")
    check_the_same(folder, tmp_path / "written", begun=bos == "off")


def test_a_tokenizer_that_is_given_is_the_one_that_is_written(tmp_path: Path) -> None:
    folder = saved("two opening tokens", tmp_path / "a")
    other = saved("byte-level BPE", tmp_path / "b")
    given = AutoTokenizer.from_pretrained(other)
    expected = given("ab <sop> a").input_ids
    assert AutoTokenizer.from_pretrained(folder)("ab <sop> a").input_ids != expected
    wakeful.export(folder, tmp_path / "exported", tokenizer=given)
    cure(folder, tmp_path / "cured", rotate="hadamard", tokenizer=str(other))
    for written in ("exported", "cured"):
        assert AutoTokenizer.from_pretrained(tmp_path / written)("ab <sop> a").input_ids == expected
    found = wakeful.inherit(
        folder, text=str(tmp_path / "words.txt"), blocks=[0, 2], steps=1, length=16, batch_size=2,
        device="cpu", out=tmp_path / "heirs", tokenizer=given,
    )  # fmt: skip
    assert found.model.encode("ab") == [*given.encode("")[:2], *found.model.encode_plain("ab")]
    kept = AutoTokenizer.from_pretrained(tmp_path / "heirs" / REFERENCE)
    assert kept("ab <sop> a").input_ids == expected


def test_a_template_that_spells_bos_is_refused_unless_it_marks_turns(tmp_path: Path) -> None:
    folder = saved("byte-level BPE", tmp_path / "theirs")
    file = folder / "chat_template.jinja"
    file.write_text("<s>{% for m in messages %}[{{ m.content }}{% endfor %}")
    with pytest.raises(WakefulError, match="chat template of theirs writes BOS by its name"):
        cure(folder, tmp_path / "no", prefix="bos")
    for template in ("{% for m in messages %}<s>{{ m.content }}{% endfor %}<s>", "no turns"):
        file.write_text(template)
        out = tmp_path / f"out {len(template)}"
        cure(folder, out, prefix="bos")
        assert AutoTokenizer.from_pretrained(out).chat_template["default"] == template


def test_a_context_that_was_cut_stays_cut(tmp_path: Path) -> None:
    folder = saved("Unigram", tmp_path / "theirs")
    model = wakeful.load(folder, device="cpu", max_length=24)
    wakeful.export(model, tmp_path / "exported")
    words = tmp_path / "words.txt"
    wakeful.cure(
        model, rotate="hadamard", text=words, length=16, num_sequences=2, out=tmp_path / "cured"
    )
    wakeful.quantize(model, "fine", save=str(tmp_path / "quantized"))
    for name in ("exported", "cured", "quantized"):
        read = wakeful.load(tmp_path / name, device="cpu")
        assert read.context == 24, name
        assert read.tokenizer.model_max_length == 24, name


def test_tokens_past_the_embedding_are_refused_wherever_they_come_from(tmp_path: Path) -> None:
    folder = saved("byte-level BPE", tmp_path / "theirs")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"new {number}" for number in range(9)])
    last = len(tokenizer) - 1
    size = last - 5
    tokenizer.chat_template = "{{ messages[0].content }}new 8"
    tokenizer.add_special_tokens({"bos_token": "new 7", "eos_token": "new 8"})
    of_transformers_own = wakeful.load(folder, device="cpu", tokenizer=tokenizer)
    ours = replace(read_decoder(folder), read_tokenizer=lambda: tokenizer)
    calls: list[Callable[[Model], object]] = [
        lambda model: model.generate("a", chat=True, num_tokens=1),
        lambda model: model.generate("", num_tokens=1),
        lambda model: model.generate("a", bos="on", num_tokens=1),
        lambda model: model.generate([last], num_tokens=1),
        lambda model: model.encode_plain("new 5"),
        lambda model: wakeful.cure(model, prefix="bos", text=tmp_path / "words.txt", length=8),
    ]
    for model in (of_transformers_own, ours):
        for call in calls:
            with pytest.raises(WakefulError, match=rf"token \d+, and has embeddings of {size} "):
                call(model)
        with pytest.raises(WakefulError, match="token -1, and has embeddings"):
            model.generate([-1], num_tokens=1)
