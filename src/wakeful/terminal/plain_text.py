"""UTF-8 text from bytes, and text that is safe for a terminal or a page.

Other encodings are refused with the command that converts them.
"""

import re
import shlex
from pathlib import Path

from wakeful.errors import WakefulError

_HEAD = 4096
"""Bytes of a file's beginning whose zeros are counted."""

_CONTROLS = re.compile(
    "[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters (C0, DEL, C1), line ends, marks of writing direction and surrogates."""


def escape_controls(text: str, *, keep: str = "") -> str:
    """Replace the characters that control a terminal: a C0 character or DEL by its symbol (␛), any
    other by �. Characters in `keep` stay.
    """

    def replace(match: re.Match[str]) -> str:
        character = match[0]
        if character in keep:
            return character
        if character < " ":
            return chr(0x2400 + ord(character))
        return "␡" if character == "\x7f" else "�"

    return _CONTROLS.sub(replace, text)


def escape_markdown(text: object) -> str:
    """Escape a text for one line of Markdown: its special characters, so that no part is read as a
    link, an HTML element or code, and a first character that would begin a block.
    """
    line = re.sub(r"([\\`*\[\]<>|])", r"\\\1", escape_controls(str(text)).strip())
    return re.sub("^([#+=~-])", r"\\\1", line)


def decode_utf8(data: bytes, name: str | Path, *, offset: int = 0) -> str:
    """Decode UTF-8 without a byte order mark; `data` begins at byte `offset` of the file `name`.

    Raises:
        WakefulError: the data is in another encoding.
    """
    head = data[:_HEAD]
    # Zeros are valid UTF-8, but a quarter of a text's bytes only in UTF-16 or UTF-32.
    if offset == 0 and 4 * head.count(0) > len(head):
        raise WakefulError(
            f"{name}: not UTF-8 text, but like UTF-16 or UTF-32{_conversion_hint(name)}"
        )
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WakefulError(
            f"{name}: not UTF-8 text at byte {offset + error.start}{_conversion_hint(name)}"
        ) from None
    # Some editors begin a file with a byte order mark, which is not part of its text.
    return text.removeprefix("\ufeff") if offset == 0 else text


def _conversion_hint(name: str | Path) -> str:
    """Return the part of an error message that says how to convert a file to UTF-8."""
    path, new = shlex.quote(str(name)), shlex.quote(f"{name}.utf8")
    command = f"iconv -f ENCODING -t UTF-8 {path} > {new} && mv {new} {path}"
    return f": unpack it, convert it ({command}) or leave it out"
