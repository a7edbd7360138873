"""A tokenizer as GGUF files say it: byte-level BPE by its merges, SentencePiece BPE by scores.

llama.cpp knows ways of cutting text by name and reads no pattern, so that what has no name there is
refused. SentencePiece's merges are not in a file either: llama.cpp joins any two neighbors whose
text is a token, the one of the highest score first, which has to be what the merges do.
"""

import itertools
import json
from typing import Any

from gguf import Keys, TokenType

from wakeful.data.encoding import read_merges
from wakeful.data.tokenizer import GENERATION, Tokenizer, token_ids
from wakeful.errors import WakefulError
from wakeful.hf.checkpoint_reader import check_pad_token

_KEYS = Keys.Tokenizer
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SPLITS = {
    (rf"{_WORDS}|\p{{N}}{{1,3}}|{_OTHER}|{_REST}", True): "llama-bpe",
    (rf"{_WORDS}|\p{{N}}{{1,3}}|{_OTHER}|{_REST}", False): "dbrx",
    (rf"{_WORDS}|\p{{N}}|{_OTHER}|{_REST}", False): "qwen2",
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",
        True,
    ): "tekken",
}
"""llama.cpp's name of a pattern, and of whether a word that is a token is taken before merging."""
_SPACE = "\u2581"
_MOST_ENDS = 3
"""Tokens that end what a model writes, of which a file has a key for each."""
_PHI3, _PHI3_KEPT = ("phi-3", "phi3"), {"<unk>", "<s>", "<|endoftext|>"}
"""Models behind whose special tokens, but these, llama.cpp drops white space."""
_RARE = -1000.0
"""The score of tokens that no merge makes."""


def gguf_tokenizer_fields(tokenizer: Tokenizer, size: int, name: str = "") -> dict[str, Any]:
    """Return what a file says of a tokenizer, by key, but for chat templates.

    It has `size` tokens, padded where the tokenizer has fewer; `name` is the file's.

    Raises:
        WakefulError: llama.cpp has no name for how the tokenizer cuts text, merges otherwise, or
            has no place for how it matches tokens or for what it puts around a text.
    """
    _check_expressible(tokenizer, name)
    table = json.loads(tokenizer.inner.to_str())
    tokens, kinds = _tokens(tokenizer, size)
    if _is_bpe(table) and table["model"].get("byte_fallback"):
        fields = _sentencepiece(table, tokens, kinds)
    else:
        fields = {_KEYS.MODEL: "gpt2", _KEYS.PRE: _pattern(table), _KEYS.LIST: tokens,
                 _KEYS.TOKEN_TYPE: kinds,
                 _KEYS.MERGES: [*map(" ".join, read_merges(table["model"]))]}  # fmt: skip
    fields |= zip((_KEYS.EOS_ID, _KEYS.EOT_ID, _KEYS.EOM_ID), _ends(tokenizer), strict=False)
    fields |= {_KEYS.BOS_ID: tokenizer.bos, _KEYS.PAD_ID: check_pad_token(tokenizer.pad, size)}
    fields |= {_KEYS.ADD_BOS: bool(tokenizer.opening), _KEYS.ADD_EOS: bool(tokenizer.closing)}
    return {key: value for key, value in fields.items() if value is not None}


def _ends(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that end what a model writes, the tokenizer's first."""
    settings = json.loads(tokenizer.companion_files.get(GENERATION, "{}"))
    return list(dict.fromkeys([tokenizer.end_of_text, *token_ids(settings, "eos_token_id")]))


def _check_expressible(tokenizer: Tokenizer, name: str) -> None:
    added = tokenizer.inner.get_added_tokens_decoder().values()
    stripped = {token.content for token in added if token.rstrip}
    special = {token.content for token in added if token.special or token.content == "</s>"}
    if any(model_name in name.lower() for model_name in _PHI3) and stripped == special - _PHI3_KEPT:
        stripped = set()  # which llama.cpp knows of models of that name
    for token in added:
        for how in ("lstrip", "rstrip", "single_word"):
            if getattr(token, how) and (how != "rstrip" or token.content in stripped):
                raise _lacks(f"the token {token.content!r} that matches with {how}")
    if tokenizer.opening not in ([], [tokenizer.bos]):
        raise _lacks(f"{tokenizer.opening}, which are put before a text and are not BOS alone")
    if tokenizer.closing not in ([], [tokenizer.end_of_text]):
        raise _lacks(f"{tokenizer.closing}, which are put behind a text and are not its end alone")
    if len(_ends(tokenizer)) > _MOST_ENDS:
        raise _lacks(f"{len(_ends(tokenizer))} tokens that end what the model writes")


def _lacks(feature: str) -> WakefulError:
    return WakefulError(f"a GGUF file has no place for {feature}; export a folder instead")


def _tokens(tokenizer: Tokenizer, size: int) -> tuple[list[str], list[TokenType]]:
    inner = tokenizer.inner
    added = inner.get_added_tokens_decoder()
    tokens: list[str] = []
    kinds: list[TokenType] = []
    for number in range(size):
        token = inner.id_to_token(number)
        if token is None:
            kind = TokenType.UNUSED
        elif number in tokenizer.special_tokens:
            kind = TokenType.CONTROL
        elif number in added:
            kind = TokenType.USER_DEFINED
        else:
            kind = TokenType.NORMAL
        tokens.append(f"[PAD{number}]" if token is None else token)
        kinds.append(kind)
    return tokens, kinds


def _is_bpe(table: dict[str, Any]) -> bool:
    return table["model"].get("type") == "BPE"


def _steps(step: dict[str, Any] | None, inside: str) -> list[dict[str, Any]]:
    """Return the steps of a part of a tokenizer, one after the other."""
    if not step:
        return []
    if step.get("type") == "Sequence":
        return [leaf for inner_step in step[inside] for leaf in _steps(inner_step, inside)]
    return [step]


def _pattern(table: dict[str, Any]) -> str:
    """Return llama.cpp's name for how byte-level BPE cuts text before it merges.

    Raises:
        WakefulError: it has none, or the tokenizer is not byte-level BPE.
    """
    parts = _steps(table.get("pre_tokenizer"), "pretokenizers")
    kinds = [part.get("type") for part in parts]
    normal = [step.get("type") for step in _steps(table.get("normalizer"), "normalizers")]
    if _is_bpe(table) and kinds and kinds[-1] == "ByteLevel" and normal in ([], ["NFC"]):
        own = parts[-1].get("use_regex", True)
        first = parts[0]
        if parts[-1].get("add_prefix_space"):
            own = None  # llama.cpp puts no space before byte-level BPE
        if kinds == ["ByteLevel"] and own:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and own and first.get("individual_digits"):
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and own is False and _isolates(first):
            pattern = first.get("pattern", {}).get("Regex", "")
            named = _SPLITS.get((pattern, bool(table["model"].get("ignore_merges"))))
            if named is not None:
                return named
    raise WakefulError(
        "llama.cpp's name for this tokenizer's pre-tokenizer is unknown here "
        "(byte-level BPE as GPT-2's, SmolLM's, Llama 3's, DBRX's, Qwen2's and Mistral's, and "
        "SentencePiece BPE are known); export a folder instead"
    )


def _isolates(split: dict[str, Any]) -> bool:
    return split.get("behavior") == "Isolated" and not split.get("invert")


def _sentencepiece(
    table: dict[str, Any], tokens: list[str], kinds: list[TokenType]
) -> dict[str, Any]:
    joins = read_merges(table["model"])
    plain = {token for token, kind in zip(tokens, kinds, strict=True) if kind is TokenType.NORMAL}
    bytes_ = {f"<0x{byte:02X}>" for byte in range(256)}
    unknown = table["model"].get("unk_token")
    if not bytes_ <= plain:
        raise _unlike("a token for some byte is missing")
    joinable = [first + right for first, right in joins if first + right in plain]
    order = [token for token, _ in itertools.groupby(joinable)]
    if len(order) != len(set(order)):
        raise _unlike("two tokens' merges take turns")
    pairs = set(joins)
    for token in plain - bytes_:
        for split in range(1, len(token)):
            first, right = token[:split], token[split:]
            if first in plain and right in plain and (first, right) not in pairs:
                raise _unlike(
                    f"{first!r} and {right!r} are not merged, though {token!r} is a token"
                )
    scores = {token: -float(rank) for rank, token in enumerate(order)}
    scores |= dict.fromkeys(bytes_, 0.0)
    kinds = [
        TokenType.BYTE if token in bytes_ else TokenType.UNKNOWN if token == unknown else kind
        for token, kind in zip(tokens, kinds, strict=True)
    ]
    singles = -float(len(order))  # a character by itself is made by no merge
    return {
        _KEYS.MODEL: "llama", _KEYS.PRE: "default", _KEYS.LIST: tokens, _KEYS.TOKEN_TYPE: kinds,
        _KEYS.SCORES: [scores.get(t, singles if len(t) == 1 else _RARE) for t in tokens],
        _KEYS.ADD_PREFIX: _space_prefix(table),
        _KEYS.UNK_ID: tokens.index(unknown) if unknown in tokens else None,
    }  # fmt: skip


def _space_prefix(table: dict[str, Any]) -> bool:
    """Tell whether a space is put before a text, whose spaces are then written as "▁"."""
    normal = _steps(table.get("normalizer"), "normalizers")
    cuts = _steps(table.get("pre_tokenizer"), "pretokenizers")
    replaced = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    put = {"type": "Prepend", "prepend": _SPACE}
    # The normalizer leaves no " ", so that a cut at one does nothing.
    other_cuts = [cut for cut in cuts if cut.get("pattern") != {"String": " "}]
    if not other_cuts and normal in ([put, replaced], [replaced]):
        return normal[0] == put
    (cut,) = cuts if len(cuts) == 1 else ({},)
    keeps_spaces = cut.get("type") == "Metaspace" and not cut.get("split", True)
    if not normal and keeps_spaces and cut.get("replacement") == _SPACE:
        return cut.get("prepend_scheme") != "never"
    raise _unlike("its spaces are written in another way")


def _unlike(why: str) -> WakefulError:
    return WakefulError(
        f"the tokenizer is not the SentencePiece BPE that llama.cpp runs: {why}; export a folder "
        "instead"
    )
