"""Text to token ids: what a text spells is text, and special ids come from the program alone.

The spelling of a special token inside a text ("<|endoftext|>" in a page about tokenizers) is
encoded as ordinary characters, whatever the model of the tokenizer: byte-level BPE never makes such
a token of a text, but Unigram, WordPiece and WordLevel hold its spelling as an entry like any
other. So the encoder is built with special tokens of another spelling, which no text can guess.
"""

import itertools
import json
import math
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tokenizers

from wakeful.errors import WakefulError
from wakeful.guard import wrap_errors

ANOTHER = "; give the model another tokenizer"
PIECE_CHARACTERS = 2**18  # of a long text, encoded at a time
_PROBES = (2**8, 2**10, 2**12, 2**14)
"""Characters of a text that a tokenizer is timed on before it gets the whole."""
_SLOWEST = 1.0
"""Seconds of processor time that it may take for those: a busy machine refuses no tokenizer."""
_MOST_GROWTH = 256
"""Characters that a normalizer or a decoder may make of one."""


class Encoder:
    """Encodes texts as the tokenizer that `description`, a tokenizer.json, describes.

    Nothing is added around a text, and nothing is truncated or padded.
    """

    def __init__(self, description: str, special: Iterable[str] = ()) -> None:
        """Read a tokenizer.json; tokens that it calls special, and those in `special`, are never
        found in a text.

        Raises:
            WakefulError: the tokenizer can make a text many times as long.
        """
        table = json.loads(description)
        check_growth(table)
        self._cuts_are_free = _cuts_are_free(table)
        with wrap_errors("the tokenizer is damaged", ANOTHER):
            self._inner = tokenizers.Tokenizer.from_str(
                json.dumps(_hide_special_tokens(table, special))
            )
        self._proven = 0

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, encoded together.

        Raises:
            WakefulError: a text holds half a character, or a character without a token where the
                tokenizer has no token for unknown ones; or it takes too long.
        """
        encoded: list[list[int]] = []
        for long, alike in itertools.groupby(texts, lambda text: len(text) > PIECE_CHARACTERS):
            if not long:
                encoded += self._ids(list(alike))
                continue
            for text in alike:
                encoded.append([i for part in self.pieces(text) for i in self._ids([part])[0]])
        return encoded

    def with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of a text, and how many of its characters lie before each one's end."""
        ids: list[int] = []
        ends: list[int] = []
        begin = 0
        for piece in self.pieces(text):
            self._prove(piece)
            (encoding,) = self._run([piece], offsets=True)
            ids += encoding.ids
            ends += [begin + end for _, end in encoding.offsets]
            begin += len(piece)
        return ids, ends

    def pieces(self, text: str) -> Iterator[str]:
        """Return `text` in parts whose ids, one after the other, are its ids.

        A long text need not be encoded as a whole, which takes some 100 bytes a token. There is
        one part where no cut is safe.
        """
        return pieces(text) if self._cuts_are_free else iter([text])

    def _ids(self, texts: list[str]) -> list[list[int]]:
        self._prove(max(texts, key=len))
        return [encoding.ids for encoding in self._run(texts)]

    def _prove(self, text: str) -> None:
        """Refuse a tokenizer that is slow beyond reason before it gets a long text."""
        for size in _PROBES:
            if self._proven < size <= len(text):
                began = time.process_time()
                self._run([text[:size]])
                seconds = time.process_time() - began
                if seconds > _SLOWEST:
                    raise WakefulError(
                        f"the tokenizer takes {seconds:.0f} s for {size} characters: its "
                        "regular expression runs away; give the model another tokenizer"
                    )
                self._proven = size

    def _run(self, texts: list[str], *, offsets: bool = False) -> list[tokenizers.Encoding]:
        run = self._inner.encode_batch if offsets else self._inner.encode_batch_fast
        with wrap_errors("the tokenizer cannot encode a text", ANOTHER):
            try:
                return run(texts, add_special_tokens=False)
            except (TypeError, UnicodeEncodeError) as error:
                raise WakefulError(
                    "a text to encode holds half a surrogate pair, which is not Unicode text: mend "
                    "it"
                ) from error


def pieces(text: str) -> Iterator[str]:
    """Return `text` in pieces of about PIECE_CHARACTERS, cut where byte-level BPE cuts anyway.

    GPT-2's pattern lets white space only begin a word, so between a visible character and a space
    or a newline there is always a cut, whatever stands around.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = start + PIECE_CHARACTERS
        while end < len(text) and not (text[end] in " \n" and not text[end - 1].isspace()):
            end += 1
        yield text[start:end]
        start = end
    if start < len(text) or not text:
        yield text[start:]


def check_growth(description: dict[str, Any]) -> None:
    """Raise `WakefulError` for a tokenizer that makes a text, or ids, many times as long."""
    for part in ("normalizer", "decoder"):
        growth = _growth(description.get(part))
        if growth > _MOST_GROWTH:
            raise WakefulError(
                f"the tokenizer's {part} can make a text {growth} times as long, and {_MOST_GROWTH}"
                " times are the most: it is damaged"
            )


def _growth(step: Any) -> int:
    """Return the most characters that a step of a tokenizer.json turns one character into."""
    match step:
        case {"type": "Sequence", "normalizers": steps} | {"type": "Sequence", "decoders": steps}:
            return math.prod(map(_growth, steps))
        case {"type": "Replace", "pattern": pattern, "content": content}:
            between = not pattern.get("String")  # it may match nothing, before every character
            return max(1, len(content)) + between
        case {"type": "Prepend", "prepend": before}:
            return 1 + len(before)
        case _:
            return 1


def _hide_special_tokens(table: dict[str, Any], special: Iterable[str]) -> dict[str, Any]:
    """Return the description of a tokenizer whose special tokens have names that nobody knows."""
    model, added = table["model"], table["added_tokens"]
    names = {*special, *(token["content"] for token in added if token["special"])}
    names = {name for name in names if len(name) > 1}  # a character has no other spelling
    named = {name: f"\ufffe{secrets.token_hex(16)}" for name in names}
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        vocabulary = {named.get(token, token): number for token, number in vocabulary.items()}
    else:
        vocabulary = [[named.get(token, token), score] for token, score in vocabulary]
    hidden: dict[str, Any] = {"vocab": vocabulary}
    if model.get("unk_token") in names:
        hidden["unk_token"] = named[model["unk_token"]]
    if "merges" in model:
        prefix = model.get("continuing_subword_prefix") or ""
        hidden["merges"] = [
            (left, right)
            for left, right in merges(model)
            if not names & {left, right, left + right.removeprefix(prefix)}
        ]
    added = [token | {"content": named.get(token["content"], token["content"])} for token in added]
    return table | {
        "model": model | hidden, "added_tokens": added, "post_processor": None,
        "truncation": None, "padding": None,
    }  # fmt: skip


def merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the pairs that the description of a BPE merges, in order."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    return [(left, right) for left, right in pairs]


def _cuts_are_free(description: dict[str, Any]) -> bool:
    """Return whether encoding the `pieces` of a text is encoding it; for GPT-2's kind it is."""
    split = description["pre_tokenizer"] or {}
    plain = all(token["special"] for token in description["added_tokens"])
    return (
        plain  # other added tokens may hold spaces, and a cut might go through one
        and description["normalizer"] is None
        and split.get("type") == "ByteLevel"
        and split.get("use_regex", True)
        and not split.get("add_prefix_space", True)
    )
