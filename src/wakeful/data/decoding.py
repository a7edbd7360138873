"""Text from token ids that come one at a time, never with half a character in it."""

import codecs

from tokenizers import decoders

from wakeful.data.tokenizer import Tokenizer

UNFINISHED = "\ufffd"  # what decoding puts in the place of bytes that are not a character (yet)


def byte_alphabet() -> dict[str, int]:
    """Return the characters that stand for the 256 bytes in a byte-level vocabulary (GPT-2)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + place): byte for place, byte in enumerate(others)}


class StreamDecoder:
    """Pieces of text from ids, which joined are `tokenizer.decode` of all the ids.

    For byte-level tokenizers this holds for every sequence of ids, broken UTF-8 included; for
    others it holds where the ids came from text. Special tokens are left out unless `special`.
    """

    def __init__(self, tokenizer: Tokenizer, *, special: bool = False) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._bytes = (
            byte_alphabet() if isinstance(tokenizer.inner.decoder, decoders.ByteLevel) else None
        )
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held: list[int] = []  # other tokenizers: the ids whose text is still in the window
        self._num_old = 0  # how many of them are out
        self._emitted = 0  # and how many characters of the window's text

    def push(self, token: int) -> str:
        """Return the text that is certain after one more id: none, or one or more characters."""
        if not self._special and token in self._tokenizer.special_tokens:
            return ""
        if self._bytes is not None:
            return self._utf8.decode(self._token_bytes(token, self._bytes))
        return self._push_to_window(token)

    def flush(self) -> str:
        """Return the rest, unfinished characters as U+FFFD; the decoder is then as new."""
        if self._bytes is not None:
            rest = self._utf8.decode(b"", final=True)
            self._utf8.reset()
            return rest
        rest = self._window_text()[self._emitted :]
        self._held, self._num_old, self._emitted = [], 0, 0
        return rest

    def _token_bytes(self, token: int, alphabet: dict[str, int]) -> bytes:
        piece = self._tokenizer.inner.id_to_token(token)
        if piece is None:
            return b""
        try:
            return bytes([alphabet[character] for character in piece])
        except KeyError:  # an added token, kept as it is written
            return piece.encode("utf-8")

    def _push_to_window(self, token: int) -> str:
        # How an id decodes may hang on the one before (a leading space, a run of bytes), so the
        # window keeps the ids of the last piece that came out beside those still unfinished.
        self._held.append(token)
        text = self._window_text()
        if text.endswith(UNFINISHED) or len(text) <= self._emitted:
            return ""
        new = text[self._emitted :]
        self._held = self._held[self._num_old :]
        self._num_old = len(self._held)
        self._emitted = len(self._window_text())
        return new

    def _window_text(self) -> str:
        return self._tokenizer.decode(self._held, special=self._special)
