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
from wakeful.hf.checkpoint_reader import pad_token_with_row

_KEYS = Keys.Tokenizer
_REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_NAMES_BY_PATTERN = {
    (rf"{_WORDS}|\p{{N}}{{1,3}}|{_OTHER}|{_REST}", True): "llama-bpe",
    (rf"{_WORDS}|\p{{N}}{{1,3}}|{_OTHER}|{_REST}", False): "dbrx",
    (rf"{_WORDS}|\p{{N}}|{_OTHER}|{_REST}", False): "qwen2",
    (
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
        rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_REST}",
        True,
    ): "tekken",
}
"""llama.cpp's names of pre-tokenizers, by their pattern and by `ignore_merges`: whether a word that
is a token is taken without merging."""
_SPACE = "\u2581"
_MOST_END_TOKENS = 3
"""Tokens that end what a model writes, of which a file has a key for each."""
_PHI3, _PHI3_KEPT = ("phi-3", "phi3"), {"<unk>", "<s>", "<|endoftext|>"}
"""Models behind whose special tokens, but these, llama.cpp drops white space."""
_UNMERGED_SCORE = -1000.0
"""The score of tokens that no merge makes."""


def gguf_tokenizer_fields(tokenizer: Tokenizer, size: int, name: str = "") -> dict[str, Any]:
    """Return a tokenizer's metadata in a GGUF file, by key, without its chat templates.

    The vocabulary has `size` tokens, with unused ones where the tokenizer has fewer. `name` is the
    model's name, by which llama.cpp recognizes a Phi-3.

    Raises:
        WakefulError: llama.cpp has no name for the tokenizer's pre-tokenizer, would merge tokens
            otherwise, or cannot express how added tokens match or which tokens surround a text.
    """
    _check_expressible(tokenizer, name)
    table = json.loads(tokenizer.inner.to_str())
    tokens, kinds = _list_tokens(tokenizer, size)
    if _is_bpe(table) and table["model"].get("byte_fallback"):
        fields = _sentencepiece_fields(table, tokens, kinds)
    else:
        merge_texts = [" ".join(pair) for pair in read_merges(table["model"])]
        fields = {_KEYS.MODEL: "gpt2", _KEYS.PRE: _pre_tokenizer_name(table), _KEYS.LIST: tokens,
                  _KEYS.TOKEN_TYPE: kinds, _KEYS.MERGES: merge_texts}  # fmt: skip
    end_keys = (_KEYS.EOS_ID, _KEYS.EOT_ID, _KEYS.EOM_ID)
    fields |= zip(end_keys, _list_end_tokens(tokenizer), strict=False)  # one to three tokens
    fields |= {_KEYS.BOS_ID: tokenizer.bos, _KEYS.PAD_ID: pad_token_with_row(tokenizer.pad, size)}
    fields |= {_KEYS.ADD_BOS: bool(tokenizer.opening), _KEYS.ADD_EOS: bool(tokenizer.closing)}
    return {key: value for key, value in fields.items() if value is not None}


def _list_end_tokens(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens that end generation: the tokenizer's end of text, then the `eos_token_id`s
    of its generation settings.
    """
    settings = json.loads(tokenizer.companion_files.get(GENERATION, "{}"))
    return list(dict.fromkeys([tokenizer.end_of_text, *token_ids(settings, "eos_token_id")]))


def _check_expressible(tokenizer: Tokenizer, name: str) -> None:
    """Raise `WakefulError` where a GGUF file cannot say how a tokenizer matches its added tokens,
    which tokens surround a text, or which tokens end generation.

    A file says nothing of white space around tokens. But if the model's `name` is a Phi-3's,
    llama.cpp drops white space after all special tokens and "</s>", except those of `_PHI3_KEPT`.
    """
    added = tokenizer.inner.get_added_tokens_decoder().values()
    stripping = {token.content for token in added if token.rstrip}  # white space after the token
    special = {token.content for token in added if token.special or token.content == "</s>"}
    is_phi3 = any(model_name in name.lower() for model_name in _PHI3)
    strips_like_phi3 = is_phi3 and stripping == special - _PHI3_KEPT
    refused = ("lstrip", "single_word") if strips_like_phi3 else ("lstrip", "rstrip", "single_word")
    for token in added:
        for option in refused:
            if getattr(token, option):
                raise _not_expressible(f"the token {token.content!r} that matches with {option}")
    if tokenizer.opening not in ([], [tokenizer.bos]):
        raise _not_expressible(
            f"the tokens {tokenizer.opening} before a text, which are not BOS alone"
        )
    if tokenizer.closing not in ([], [tokenizer.end_of_text]):
        raise _not_expressible(
            f"the tokens {tokenizer.closing} after a text, which are not the end of text alone"
        )
    num_ends = len(_list_end_tokens(tokenizer))
    if num_ends > _MOST_END_TOKENS:
        raise _not_expressible(f"{num_ends} tokens that end generation")


def _not_expressible(feature: str) -> WakefulError:
    return WakefulError(f"a GGUF file has no place for {feature}; export a folder instead")


def _list_tokens(tokenizer: Tokenizer, size: int) -> tuple[list[str], list[TokenType]]:
    """Return the first `size` tokens of a vocabulary, in the order of their ids, and their GGUF
    types. An id n that the tokenizer does not use becomes an unused token "[PADn]".
    """
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


def _flatten_steps(step: dict[str, Any] | None, key: str) -> list[dict[str, Any]]:
    """Return the steps of a tokenizer's normalizer or pre-tokenizer in order, with nested sequences
    flattened. `key` is the entry in which a sequence lists its steps.
    """
    if not step:  # the tokenizer has no normalizer or pre-tokenizer
        return []
    if step.get("type") == "Sequence":
        return [leaf for inner_step in step[key] for leaf in _flatten_steps(inner_step, key)]
    return [step]


def _pre_tokenizer_name(table: dict[str, Any]) -> str:
    """Return llama.cpp's name for the pre-tokenizer of a byte-level BPE, which splits a text into
    words.

    `table` is the content of tokenizer.json.

    Raises:
        WakefulError: no name is known, or the tokenizer is not byte-level BPE.
    """
    steps = _flatten_steps(table.get("pre_tokenizer"), "pretokenizers")
    step_types = [step.get("type") for step in steps]
    normalizers = [
        step.get("type") for step in _flatten_steps(table.get("normalizer"), "normalizers")
    ]
    ends_in_bytes = step_types[-1:] == ["ByteLevel"]
    is_byte_level = _is_bpe(table) and ends_in_bytes and normalizers in ([], ["NFC"])
    # llama.cpp puts no space before a text of a byte-level BPE.
    if is_byte_level and not steps[-1].get("add_prefix_space"):
        uses_gpt2_pattern = steps[-1].get("use_regex", True)
        if step_types == ["ByteLevel"] and uses_gpt2_pattern:
            return "gpt-2"
        splits_digits = step_types == ["Digits", "ByteLevel"] and steps[0].get("individual_digits")
        if splits_digits and uses_gpt2_pattern:
            return "smollm"
        if step_types == ["Split", "ByteLevel"] and not uses_gpt2_pattern and _isolates(steps[0]):
            pattern = steps[0].get("pattern", {}).get("Regex", "")
            name = _NAMES_BY_PATTERN.get((pattern, bool(table["model"].get("ignore_merges"))))
            if name is not None:
                return name
    raise WakefulError(
        "llama.cpp's name for this tokenizer's pre-tokenizer is unknown here "
        "(byte-level BPE as GPT-2's, SmolLM's, Llama 3's, DBRX's, Qwen2's and Mistral's, and "
        "SentencePiece BPE are known); export a folder instead"
    )


def _isolates(split: dict[str, Any]) -> bool:
    """Tell whether a "Split" step makes every match of its pattern a word of its own."""
    return split.get("behavior") == "Isolated" and not split.get("invert")


def _sentencepiece_fields(
    table: dict[str, Any], tokens: list[str], kinds: list[TokenType]
) -> dict[str, Any]:
    """Return the GGUF metadata of a SentencePiece BPE: among others the tokens, their types and
    their scores.

    llama.cpp merges the two neighbors whose joined token has the highest score. So a token's score
    is minus the rank of its merges in the tokenizer's own list.

    Raises:
        WakefulError: llama.cpp would not merge in the order of that list, a byte has no token, or
            spaces are written in another way than by SentencePiece.
    """
    merge_pairs = read_merges(table["model"])
    normal = {token for token, kind in zip(tokens, kinds, strict=True) if kind is TokenType.NORMAL}
    byte_tokens = {f"<0x{byte:02X}>" for byte in range(256)}
    unknown = table["model"].get("unk_token")
    if not byte_tokens <= normal:
        raise _not_sentencepiece("a token for some byte is missing")
    merged_tokens = [left + right for left, right in merge_pairs if left + right in normal]
    # Several pairs may make the same token. One score stands for them if they are in succession:
    # `groupby` then lists the token once.
    order = [token for token, _ in itertools.groupby(merged_tokens)]
    if len(order) != len(set(order)):
        raise _not_sentencepiece("two tokens' merges take turns")
    # llama.cpp joins any two neighbors that make a token, so every such pair must be a merge.
    known_pairs = set(merge_pairs)
    for token in normal - byte_tokens:
        for split in range(1, len(token)):
            left, right = token[:split], token[split:]
            if left in normal and right in normal and (left, right) not in known_pairs:
                raise _not_sentencepiece(
                    f"{left!r} and {right!r} are not merged, though {token!r} is a token"
                )
    scores = {token: -float(rank) for rank, token in enumerate(order)}
    scores |= dict.fromkeys(byte_tokens, 0.0)
    special_types = dict.fromkeys(byte_tokens, TokenType.BYTE)
    if unknown is not None:
        special_types.setdefault(unknown, TokenType.UNKNOWN)
    kinds = [special_types.get(token, kind) for token, kind in zip(tokens, kinds, strict=True)]
    for token in tokens:  # tokens without a score: no merge makes them
        is_character = len(token) == 1
        scores.setdefault(token, -float(len(order)) if is_character else _UNMERGED_SCORE)
    return {
        _KEYS.MODEL: "llama", _KEYS.PRE: "default", _KEYS.LIST: tokens, _KEYS.TOKEN_TYPE: kinds,
        _KEYS.SCORES: [scores[token] for token in tokens],
        _KEYS.ADD_PREFIX: _adds_space_prefix(table),
        _KEYS.UNK_ID: tokens.index(unknown) if unknown in tokens else None,
    }  # fmt: skip


def _adds_space_prefix(table: dict[str, Any]) -> bool:
    """Tell whether a SentencePiece tokenizer puts a space before a text.

    Such a tokenizer writes spaces as "▁": either by its normalizers, or by a pre-tokenizer of type
    "Metaspace".

    Raises:
        WakefulError: its normalizer and pre-tokenizer treat spaces in another way.
    """
    normalizers = _flatten_steps(table.get("normalizer"), "normalizers")
    splits = _flatten_steps(table.get("pre_tokenizer"), "pretokenizers")
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    prepend = {"type": "Prepend", "prepend": _SPACE}
    # After these normalizers a text has no " ", so that a split at " " does nothing.
    other_splits = [split for split in splits if split.get("pattern") != {"String": " "}]
    if not other_splits and normalizers in ([prepend, replace], [replace]):
        return normalizers[0] == prepend
    if not normalizers and len(splits) == 1:
        metaspace = splits[0]
        keeps_spaces = metaspace.get("type") == "Metaspace" and not metaspace.get("split", True)
        if keeps_spaces and metaspace.get("replacement") == _SPACE:
            return metaspace.get("prepend_scheme") != "never"
    raise _not_sentencepiece("its spaces are written in another way")


def _not_sentencepiece(why: str) -> WakefulError:
    return WakefulError(
        f"the tokenizer is not the SentencePiece BPE that llama.cpp runs: {why}; export a folder "
        "instead"
    )
