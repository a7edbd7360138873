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

USE_ANOTHER_TOKENIZER = "; give the model another tokenizer"
PIECE_CHARACTERS = 2**18  # of a long text, encoded at a time
_PROBES = (2**8, 2**10, 2**12, 2**14)
"""Sizes of a text's beginning, in characters, on which a tokenizer is timed before it encodes the
whole text."""
_SLOWEST = 1.0
"""Most seconds of processor time for one of these; other programs on the machine do not count."""
_MOST_GROWTH = 256
"""Characters that a normalizer or a decoder may make of one."""


class Encoder:
    """Encodes texts as the tokenizer that `description`, a tokenizer.json, describes.

    Nothing is added around a text, and nothing is truncated or padded.
    """

    def __init__(self, description: str, special: Iterable[str] = ()) -> None:
        """Build the tokenizer from `description`, the text of a tokenizer.json.

        No text is encoded to a token that it marks as special, or to one spelled in `special`.

        Raises:
            WakefulError: the tokenizer is damaged, or can make a text many times as long.
        """
        table = json.loads(description)
        check_growth(table)
        self._can_encode_in_pieces = _can_encode_in_pieces(table)
        with wrap_errors("the tokenizer is damaged", USE_ANOTHER_TOKENIZER):
            self._inner = tokenizers.Tokenizer.from_str(
                json.dumps(_hide_special_tokens(table, special))
            )
        self._num_timed_characters = 0  # length of the longest text whose encoding was timed

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, in order; neighboring short texts are encoded together, long
        texts in pieces.

        Raises:
            WakefulError: a text holds half a surrogate pair, or a character without a token where
                the tokenizer has no token for unknown ones; or the tokenizer is too slow.
        """
        encoded: list[list[int]] = []
        for is_long, group in itertools.groupby(texts, lambda text: len(text) > PIECE_CHARACTERS):
            if not is_long:
                encoded += self._encode(list(group))
                continue
            for text in group:
                pieces = self.split_text(text)
                encoded.append([token for piece in pieces for token in self._encode([piece])[0]])
        return encoded

    def encode_with_ends(self, text: str) -> tuple[list[int], list[int]]:
        """Return the ids of a text, and for each id the position in the text (in characters) where
        its token ends.
        """
        ids: list[int] = []
        ends: list[int] = []
        begin = 0
        for piece in self.split_text(text):
            self._check_speed(piece)
            (encoding,) = self._call_tokenizer([piece], offsets=True)
            ids += encoding.ids
            ends += [begin + end for _, end in encoding.offsets]
            begin += len(piece)
        return ids, ends

    def split_text(self, text: str) -> Iterator[str]:
        """Split a text into pieces whose ids, concatenated, are the ids of the whole text.

        Encoding a long text as a whole would take some 100 bytes of memory per token. The text
        stays in one piece where a cut could change its ids.
        """
        return split_into_pieces(text) if self._can_encode_in_pieces else iter([text])

    def _encode(self, texts: list[str]) -> list[list[int]]:
        self._check_speed(max(texts, key=len))
        return [encoding.ids for encoding in self._call_tokenizer(texts)]

    def _check_speed(self, text: str) -> None:
        """Time the tokenizer on beginnings of `text`, before it gets the whole text; raise
        `WakefulError` if one takes more than `_SLOWEST` seconds. Each size is timed once.
        """
        for size in _PROBES:
            if self._num_timed_characters < size <= len(text):
                start = time.process_time()
                self._call_tokenizer([text[:size]])
                seconds = time.process_time() - start
                if seconds > _SLOWEST:
                    raise WakefulError(
                        f"the tokenizer takes {seconds:.0f} s for {size} characters: its "
                        "regular expression runs away; give the model another tokenizer"
                    )
                self._num_timed_characters = size

    def _call_tokenizer(
        self, texts: list[str], *, offsets: bool = False
    ) -> list[tokenizers.Encoding]:
        """Encode texts with the library `tokenizers`; any error becomes a `WakefulError`. With
        `offsets`, which take longer, the result also has the position of each token in its text.
        """
        encode = self._inner.encode_batch if offsets else self._inner.encode_batch_fast
        with wrap_errors("the tokenizer cannot encode a text", USE_ANOTHER_TOKENIZER):
            try:
                return encode(texts, add_special_tokens=False)
            except (TypeError, UnicodeEncodeError) as error:
                raise WakefulError(
                    "a text to encode holds half a surrogate pair, which is not Unicode text: mend "
                    "it"
                ) from error


def split_into_pieces(text: str) -> Iterator[str]:
    """Yield a text in pieces of about PIECE_CHARACTERS, cut only where GPT-2's pre-tokenizer splits
    words anyway, so that byte-level BPE gives the same ids.

    Its pattern allows white space only at the beginning of a word. So it always splits between a
    visible character and a space or a newline.
    """
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        end = start + PIECE_CHARACTERS
        # Go on to a space or newline after a visible character.
        while end < len(text) and (text[end] not in " \n" or text[end - 1].isspace()):
            end += 1
        yield text[start:end]
        start = end
    if start < len(text) or not text:  # an empty text is one empty piece
        yield text[start:]


def check_growth(description: dict[str, Any]) -> None:
    """Raise `WakefulError` if the normalizer or decoder that a tokenizer.json describes can turn
    one character into more than `_MOST_GROWTH`.
    """
    for part in ("normalizer", "decoder"):
        growth = _max_growth(description.get(part))
        if growth > _MOST_GROWTH:
            raise WakefulError(
                f"the tokenizer's {part} can make a text {growth} times as long, and {_MOST_GROWTH}"
                " times are the most: it is damaged"
            )


def _max_growth(step: Any) -> int:
    """Return the most characters that a step of a tokenizer.json turns one character into."""
    match step:
        case {"type": "Sequence", "normalizers": steps} | {"type": "Sequence", "decoders": steps}:
            return math.prod(map(_max_growth, steps))
        case {"type": "Replace", "pattern": pattern, "content": content}:
            is_regex = not pattern.get("String")
            # A regular expression may match the empty string before a character, which stays.
            return max(1, len(content)) + is_regex
        case {"type": "Prepend", "prepend": prefix}:
            return 1 + len(prefix)
        case _:
            return 1


def _hide_special_tokens(table: dict[str, Any], special: Iterable[str]) -> dict[str, Any]:
    """Return a copy of a tokenizer.json's table in which every special token is renamed to a random
    string, so that no text spells one.

    Special are the tokens that the table marks as such and those in `special`, except single
    characters. The copy also adds nothing around a text, and neither truncates nor pads.
    """
    model, added_tokens = table["model"], table["added_tokens"]
    names = {*special, *(token["content"] for token in added_tokens if token["special"])}
    names = {name for name in names if len(name) > 1}  # texts need every single character
    new_names = {name: f"\ufffe{secrets.token_hex(16)}" for name in names}
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        vocabulary = {new_names.get(token, token): number for token, number in vocabulary.items()}
    else:  # of a Unigram model
        vocabulary = [[new_names.get(token, token), score] for token, score in vocabulary]
    changes: dict[str, Any] = {"vocab": vocabulary}
    if model.get("unk_token") in names:
        changes["unk_token"] = new_names[model["unk_token"]]
    if "merges" in model:
        # Leave out merges of or into a special token; a merge drops the second part's prefix.
        prefix = model.get("continuing_subword_prefix") or ""
        changes["merges"] = [
            (first, second)
            for first, second in read_merges(model)
            if not names & {first, second, first + second.removeprefix(prefix)}
        ]
    renamed_tokens = [
        token | {"content": new_names.get(token["content"], token["content"])}
        for token in added_tokens
    ]
    return table | {
        "model": model | changes, "added_tokens": renamed_tokens, "post_processor": None,
        "truncation": None, "padding": None,
    }  # fmt: skip


def read_merges(model: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the merges of a BPE model of tokenizer.json, in order, each as a pair of tokens."""
    pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
    return [(first, second) for first, second in pairs]


def _can_encode_in_pieces(description: dict[str, Any]) -> bool:
    """Return whether the ids of a text are surely those of its pieces by `split_into_pieces`.

    They are if the tokenizer splits words as GPT-2's does, and does not change the text before.
    """
    pre_tokenizer = description["pre_tokenizer"] or {}
    # Added tokens that are not special may hold spaces, and a cut might go through one.
    only_special_added = all(token["special"] for token in description["added_tokens"])
    return (
        only_special_added
        and description["normalizer"] is None
        and pre_tokenizer.get("type") == "ByteLevel"
        and pre_tokenizer.get("use_regex", True)
        and not pre_tokenizer.get("add_prefix_space", True)
    )
