"""Small tokenizers of all kinds, as Transformers' users have them."""

from collections.abc import Callable

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<s>", "</s>", "<unk>", "<|im_end|>", "<pad>"]
LETTERS = [chr(code) for code in range(33, 127)]
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}<|im_end|>{% endfor %}"
)


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(_ids([*SPECIAL, *alphabet, "ab", "Ġa"]), [("a", "b"), ("Ġ", "a")]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return inner


def cut_by_a_pattern() -> Tokenizer:
    inner = byte_level()
    inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|[^\p{N}\p{L}]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return inner


def byte_fallback(scheme: str = "first") -> Tokenizer:
    fallback = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = _ids([*SPECIAL, *fallback, "▁", *LETTERS, "▁a", "ab"])
    inner = Tokenizer(
        models.BPE(
            vocabulary, [("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True,
            fuse_unk=True,
        )
    )  # fmt: skip
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence(
        steps if scheme == "never" else [*steps, decoders.Strip(" ", 1, 0)]
    )
    return inner


def legacy() -> Tokenizer:
    """Llama 2's: the space before a text put by a normalizer."""
    inner = byte_fallback()
    inner.pre_tokenizer = None  # pyright: ignore[reportAttributeAccessIssue]
    inner.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return inner


def unigram() -> Tokenizer:
    pieces = [*((token, 0.0) for token in SPECIAL), *((c, -4.0) for c in ["▁", *LETTERS])]
    inner = Tokenizer(models.Unigram([*pieces, ("▁a", -3.0), ("ab", -2.0)], unk_id=2))
    inner.normalizer = normalizers.NFKC()
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    inner.decoder = decoders.Metaspace(prepend_scheme="always")
    return inner


def word_piece() -> Tokenizer:
    vocabulary = _ids([*SPECIAL, *LETTERS, *(f"##{c}" for c in LETTERS), "ab", "##ab"])
    inner = Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    inner.normalizer = normalizers.BertNormalizer(lowercase=True)
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    inner.decoder = decoders.WordPiece()
    return inner


def word_level() -> Tokenizer:
    words = ["a", "ab", "b", "x", "def", "(", ")", ".", ","]
    inner = Tokenizer(models.WordLevel(_ids([*SPECIAL, *words]), unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return inner


def with_added_tokens() -> Tokenizer:
    inner = byte_level()
    inner.add_tokens(
        [
            AddedToken("plain", normalized=False),
            AddedToken("Norm", normalized=True),
            AddedToken("word", single_word=True),
            AddedToken("<left>", lstrip=True),
            AddedToken("   "),
        ]
    )
    inner.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=True, special=True)])
    return inner


def opened_by_two() -> Tokenizer:
    inner = byte_level()
    inner.add_special_tokens(["<sop>"])
    inner.post_processor = processors.TemplateProcessing(
        single="<s> <sop> $A", pair="<s> <sop> $A $B",
        special_tokens=[("<s>", 0), ("<sop>", inner.token_to_id("<sop>"))],
    )  # fmt: skip
    return inner


def closed() -> Tokenizer:
    inner = unigram()
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 1)]
    )
    return inner


def of_roberta() -> Tokenizer:
    inner = byte_level()
    inner.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return inner


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "byte-level BPE": byte_level,
    "BPE of a pattern": cut_by_a_pattern,
    "BPE with byte fallback": byte_fallback,
    "SentencePiece without a dummy prefix": lambda: byte_fallback("never"),
    "SentencePiece, prefix by a normalizer": legacy,
    "Unigram": unigram,
    "WordPiece": word_piece,
    "WordLevel": word_level,
    "added tokens": with_added_tokens,
    "two opening tokens": opened_by_two,
    "a closing token": closed,
    "RoBERTa's": of_roberta,
}
NO_BOS = ("byte-level BPE", "WordLevel", "added tokens")
"""Kinds that put no BOS before a text."""


def of_transformers(kind: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer of a kind, with two chat templates."""
    inner = KINDS[kind]()
    inner.add_special_tokens(SPECIAL)
    if inner.post_processor is None and kind not in NO_BOS:
        inner.post_processor = processors.TemplateProcessing(
            single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 0)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        pad_token="<pad>", additional_special_tokens=["<|im_end|>"],
        clean_up_tokenization_spaces=kind == "WordPiece",
        chat_template={"default": TEMPLATE, "tool_use": "tools:" + TEMPLATE},
    )  # fmt: skip
