"""The tokenizer: any text survives, special tokens never come from the data."""

import hashlib
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from wakeful.data import tokenizer as tokenizer_module
from wakeful.data.tokenizer import END_OF_TEXT, StreamDecoder, Tokenizer
from wakeful.errors import WakefulError

TEXTS = [
    "the quick brown fox\n  jumps over the lazy dog, naïve façade 日本語 😀" * 3,
    "def f(x):\n",
]
UNICODE = st.text(st.characters(exclude_categories=["Cs"]))
PROSE = st.text(st.sampled_from("ab é\n\t  \x1c\u3000.日😀<|>endoftx"), max_size=80)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(TEXTS, 400)


def byte_fallback():
    """A small tokenizer of Llama 2's kind: spaces as ▁, unknown characters byte by byte."""
    vocabulary = {"<unk>": 0, "</s>": 1, "▁": 2, "a": 3, "b": 4, "▁a": 5}
    vocabulary |= {f"<0x{byte:02X}>": 6 + byte for byte in range(256)}
    inner = tokenizers.Tokenizer(
        models.BPE(vocabulary, [("▁", "a")], unk_token="<unk>", byte_fallback=True)
    )
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return Tokenizer(inner, end_of_text="</s>")


def test_training_is_deterministic_and_in_no_order(tokenizer):
    again = Tokenizer.train(reversed(TEXTS), 400)
    assert again.fingerprint == tokenizer.fingerprint
    assert tokenizer.end_of_text == 0
    assert 257 < tokenizer.vocab_size <= 400


def test_the_smallest_vocabulary_is_the_bytes():
    tokenizer = Tokenizer.train(TEXTS, 257)
    assert tokenizer.vocab_size == 257
    assert len(tokenizer.encode("日本")) == 6
    with pytest.raises(WakefulError, match="at least 257"):
        Tokenizer.train(TEXTS, 256)
    with pytest.raises(WakefulError, match="at most 1,048,576 tokens are trained"):
        Tokenizer.train(TEXTS, 10**20)


@settings(deadline=None)
@given(UNICODE | PROSE)
def test_any_text_comes_back(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, special=True) == text
    assert all(0 < i < tokenizer.vocab_size for i in ids)


@settings(deadline=None)
@given(st.lists(PROSE, max_size=4))
def test_a_batch_is_its_texts(tokenizer, texts):
    assert tokenizer.encode_batch(texts) == [tokenizer.encode(text) for text in texts]


@settings(deadline=None)
@given(st.lists(PROSE, max_size=4), st.integers(1, 20))
def test_long_texts_are_encoded_in_pieces_without_a_trace(tokenizer, texts, size):
    expected = tokenizer.encode_batch(texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("wakeful.data.encoding.PIECE_CHARACTERS", size)
        assert tokenizer.encode_batch(texts) == expected


def test_text_without_a_place_to_cut(tokenizer, monkeypatch):
    monkeypatch.setattr("wakeful.data.encoding.PIECE_CHARACTERS", 10)
    for text in ["x" * 100, " " * 100, "日" * 50]:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("text", [END_OF_TEXT, f"a{END_OF_TEXT}b {END_OF_TEXT * 3}"])
def test_the_spelling_of_the_special_token_is_ordinary_text(tokenizer, text):
    ids = tokenizer.encode(text)
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == text


def test_a_special_token_in_training_texts_stays_text():
    tokenizer = Tokenizer.train([f"a{END_OF_TEXT}b "] * 50, 300)
    assert tokenizer.end_of_text not in tokenizer.encode(f"a{END_OF_TEXT}b")


def test_a_special_token_that_is_in_the_vocabulary_as_text_too():
    pieces = [("<unk>", 0.0), ("</s>", 0.0), ("<", -3.0), ("/", -3.0), ("s", -3.0), (">", -3.0)]
    inner = tokenizers.Tokenizer(models.Unigram([*pieces, ("a", -3.0)], unk_id=0))
    tokenizer = Tokenizer(inner, end_of_text="</s>")
    ids = tokenizer.encode("a</s>a</s></s>")
    assert tokenizer.end_of_text not in ids
    assert ids == [6, 2, 3, 4, 5, 6, 2, 3, 4, 5, 2, 3, 4, 5]


def test_special_tokens_are_left_out_of_text_unless_wanted(tokenizer):
    ids = [*tokenizer.encode("fox"), tokenizer.end_of_text]
    assert tokenizer.decode(ids) == "fox"
    assert tokenizer.decode(ids, special=True) == "fox" + END_OF_TEXT


def test_half_a_character_is_refused(tokenizer):
    with pytest.raises(WakefulError, match="surrogate"):
        tokenizer.encode("\ud800")


@settings(deadline=None)
@given(data=st.data())
def test_streamed_text_is_decoded_text_for_any_ids(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    decoder = StreamDecoder(tokenizer)
    pieces = [decoder.push(i) for i in ids]
    assert "".join(pieces) + decoder.flush() == tokenizer.decode(ids)
    assert decoder.flush() == ""


@settings(deadline=None)
@given(UNICODE)
def test_a_stream_never_holds_half_a_character(tokenizer, text):
    decoder, sent = StreamDecoder(tokenizer), ""
    for i in tokenizer.encode(text):
        sent += decoder.push(i)
        assert text.startswith(sent)
    assert sent + decoder.flush() == text


@settings(deadline=None)
@given(st.text(st.sampled_from("ab é日😀\ufffd"), max_size=30))
def test_streams_of_tokenizers_with_other_decoders(text):
    tokenizer = byte_fallback()
    ids = tokenizer.encode(text)
    decoder = StreamDecoder(tokenizer)
    sent = "".join(decoder.push(i) for i in ids) + decoder.flush()
    assert sent == tokenizer.decode(ids)


def test_a_stream_that_continues_a_text_begins_with_its_space(tokenizer):
    vocabulary = {"[UNK]": 0, "the": 1, "fox": 2, "##es": 3}
    inner = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece()
    words = Tokenizer(inner, end_of_text="[UNK]")
    stream = StreamDecoder(words, [1] * 20)
    assert [stream.push(2), stream.push(3), stream.push(1)] == [" fox", "es", " the"]
    assert StreamDecoder(words).push(2) == "fox"
    ids = tokenizer.encode("a text é")
    for number in range(len(ids)):  # in the middle of a character, too
        stream = StreamDecoder(tokenizer, ids[:number])
        pieces = "".join(map(stream.push, ids[number:])) + stream.flush()
        before = tokenizer.decode(ids[:number]).rstrip("\ufffd")
        assert before + pieces == tokenizer.decode(ids)


def test_a_stream_outlives_bytes_that_are_broken_late():
    """Where the library's own stream raises: a byte makes one invalid that came out before."""
    tokenizer = byte_fallback()
    ids = [tokenizer.inner.token_to_id(token) for token in ("<0x41>", "<0xC3>", "▁")]
    theirs, ours = decoders.DecodeStream(skip_special_tokens=True), StreamDecoder(tokenizer)
    for i in ids[:2]:
        assert (theirs.step(tokenizer.inner, i) or "") == ours.push(i)
    with pytest.raises(Exception, match="Invalid prefix"):
        theirs.step(tokenizer.inner, ids[2])
    assert ours.push(ids[2]) == "\ufffd "


def test_save_and_load(tokenizer, tmp_path, monkeypatch):
    tokenizer.save(tmp_path / "folder")
    data = (tmp_path / "folder" / "tokenizer.json").read_bytes()
    assert hashlib.sha256(data).hexdigest() == tokenizer.fingerprint
    for path in [tmp_path / "folder", tmp_path / "folder" / "tokenizer.json"]:
        again = Tokenizer.load(path)
        assert again.fingerprint == tokenizer.fingerprint
        assert again.encode(f"fox {END_OF_TEXT}") == tokenizer.encode(f"fox {END_OF_TEXT}")
    tokenizer.save(tmp_path / "one.json")
    assert Tokenizer.load(tmp_path / "one.json").fingerprint == tokenizer.fingerprint
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Tokenizer.load("~/folder").fingerprint == tokenizer.fingerprint
    with pytest.raises(WakefulError, match="no tokenizer at ~nobody/folder"):
        Tokenizer.load("~nobody/folder")


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>", "lstrip": False}])
@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
def test_a_hugging_face_folder_names_its_end_of_text(tmp_path, eos, name):
    inner = byte_fallback().inner
    inner.enable_truncation(2)
    inner.enable_padding(length=9)
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_text(json.dumps({"eos_token": eos}))
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.end_of_text == 1
    assert tokenizer.vocab_size == 262
    assert len(tokenizer.encode("ababab")) == 6  # neither truncated nor padded
    assert tokenizer.decode(tokenizer.encode("ab </s> 日")) == "ab </s> 日"


def test_an_end_of_text_that_its_file_calls_ordinary_is_special_all_the_same(tmp_path):
    inner = Tokenizer.train(TEXTS, 300).inner
    inner.add_tokens([tokenizers.AddedToken("<stop>", special=False)])
    inner.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "<stop>"}')
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.end_of_text == inner.token_to_id("<stop>")
    assert tokenizer.end_of_text in tokenizer.special_tokens
    ids = tokenizer.encode("a <stop> b")
    assert tokenizer.end_of_text not in ids
    assert tokenizer.decode(ids) == "a <stop> b"


def test_transformers_reads_what_we_save(tokenizer, tmp_path):
    from transformers import PreTrainedTokenizerFast

    tokenizer.save(tmp_path)
    theirs = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert theirs.eos_token_id == tokenizer.end_of_text
    assert theirs("the fox")["input_ids"] == tokenizer.encode("the fox")


def test_what_cannot_be_loaded(tmp_path):
    def failure():
        with pytest.raises(WakefulError) as caught:
            Tokenizer.load(tmp_path)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    assert "no tokenizer at" in failure()
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "is not a tokenizer.json" in failure()
    byte_fallback().inner.save(str(tmp_path / "tokenizer.json"))
    assert "has no token '<|endoftext|>'" in failure()
    (tmp_path / "tokenizer_config.json").write_text("{")
    assert "is not JSON" in failure()


def test_what_lies_beside_a_tokenizer_goes_where_it_goes(tmp_path: Path) -> None:
    inner = Tokenizer.train(["a b c"], 257).inner
    inner.add_special_tokens(["<bos>", "<pad>", "<unk>"])
    theirs = PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=END_OF_TEXT, bos_token="<bos>", pad_token="<pad>",
        unk_token="<unk>", add_bos_token=True, chat_template="{{ messages[0]['content'] }}!",
    )  # fmt: skip
    theirs.save_pretrained(tmp_path / "theirs")
    (tmp_path / "theirs" / "generation_config.json").write_text('{"temperature": 0.5}')
    ours = Tokenizer.load(tmp_path / "theirs")
    assert (ours.bos, ours.pad) == (theirs.bos_token_id, theirs.pad_token_id)
    assert ours.adds_bos
    ours.save(tmp_path / "ours")
    again = AutoTokenizer.from_pretrained(tmp_path / "ours")
    for name in ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template"):
        assert getattr(again, name) == getattr(theirs, name), name
    assert again.encode("a b") == theirs.encode("a b") == [ours.bos, *ours.encode("a b")]
    assert (tmp_path / "ours" / "generation_config.json").read_text() == '{"temperature": 0.5}'
    (tmp_path / "ours" / "special_tokens_map.json").write_text("[]")
    with pytest.raises(WakefulError, match="must hold a JSON object"):
        Tokenizer.load(tmp_path / "ours")


def begins(kind: str, folder: Path) -> Tokenizer:
    """Return a tokenizer of one of the kinds that put BOS before a text."""
    inner = Tokenizer.train(["a b c"], 257).inner
    inner.add_special_tokens(["<bos>"])
    bos = ("<bos>", inner.token_to_id("<bos>"))
    first = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos>:1 $B:1", special_tokens=[bos]
    )
    ending = processors.TemplateProcessing(
        single=f"<bos> $A {END_OF_TEXT}", pair=f"<bos> $A $B {END_OF_TEXT}",
        special_tokens=[bos, (END_OF_TEXT, 0)],
    )  # fmt: skip
    inner.post_processor = {
        "template": first,
        "in a sequence": processors.Sequence([processors.ByteLevel(trim_offsets=False), first]),
        "with an end": ending,
        "named": None,
        "roberta": processors.RobertaProcessing((END_OF_TEXT, 0), bos),
    }[kind]
    named = {"add_bos_token": True} if kind == "named" else {}
    PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token=END_OF_TEXT, bos_token="<bos>", **named,
        chat_template="{{ bos_token }}{{ messages[0]['content'] }}!",
    ).save_pretrained(folder)  # fmt: skip
    return Tokenizer.load(folder)


@pytest.mark.parametrize("kind", ["template", "in a sequence", "with an end", "named", "roberta"])
def test_bos_is_taken_from_before_a_text(kind: str, tmp_path: Path) -> None:
    ours = begins(kind, tmp_path / "theirs")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "theirs")
    ours.without_bos().save(tmp_path / "ours")
    read = Tokenizer.load(tmp_path / "ours")
    again = AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert ours.adds_bos
    assert not read.adds_bos
    assert read.bos == again.bos_token_id == ours.bos
    assert theirs.encode("a b")[:1] == [ours.bos]
    assert again.encode("a b") == theirs.encode("a b")[1:]
    assert (again.encode("a b")[-1] == 0) == (kind in ("with an end", "roberta"))
    assert (again("a", "b").input_ids) == [i for i in theirs("a", "b").input_ids if i != ours.bos]
    said = [{"role": "user", "content": "a b"}]
    assert theirs.apply_chat_template(said, tokenize=False) == "<bos>a b!"
    assert again.apply_chat_template(said, tokenize=False) == "a b!"
    assert read.without_bos().fingerprint == read.fingerprint


def test_a_tokenizer_of_the_hub_is_fetched_or_says_how_to_do_without(
    tokenizer, tmp_path, monkeypatch
):
    tokenizer.save(tmp_path)
    asked = []

    def fetch(name, *, allow_patterns):
        asked.append((name, "tokenizer.json" in allow_patterns))
        if name == "none/such":
            raise OSError("no connection")
        return str(tmp_path)

    monkeypatch.setattr(tokenizer_module.huggingface_hub, "snapshot_download", fetch)
    assert Tokenizer.load("hf:some/tokenizer").fingerprint == tokenizer.fingerprint
    assert asked == [("some/tokenizer", True)]
    with pytest.raises(WakefulError, match=r"hf:none/such cannot be fetched.*data\.tokenizer"):
        Tokenizer.load("hf:none/such")
