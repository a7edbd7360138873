"""UTF-8 text from bytes, and text that is safe for a terminal or a page.

Compressed files and other encodings are refused with the command that converts them.
"""

import re
import shlex
from pathlib import Path

from wakeful.errors import WakefulError

PACKED_ENDINGS = frozenset({".gz", ".bz2", ".xz", ".zst"})
_PACKED = (
    (0, b"\x1f\x8b", ".gz", "gzip -d {}"),
    (0, b"BZh", ".bz2", "bzip2 -d {}"),
    (0, b"\xfd7zXZ\0", ".xz", "xz -d {}"),
    (0, b"\x28\xb5\x2f\xfd", ".zst", "zstd -d --rm {}"),
    (0, b"PK\3\4", "", "python -m zipfile -e {0} {0}.files"),
    (257, b"ustar", "", "python -m tarfile -e {0} {0}.files"),
)
"""Compressed formats: offset and bytes of the signature, the ending that the program requires, and
the command that unpacks."""
_HEAD = 4096

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
    """Escape a text for one line of Markdown, so that no part of it is read as a link, an HTML
    element, code or the start of a block.
    """
    line = re.sub(r"([\\`*\[\]<>|])", r"\\\1", escape_controls(str(text)).strip())
    return re.sub("^([#+=~-])", r"\\\1", line)


def decode_utf8(data: bytes, name: str | Path, *, offset: int = 0) -> str:
    """Decode UTF-8 without a byte order mark; `data` begins at byte `offset` of the file `name`.

    Raises:
        WakefulError: the data is compressed or in another encoding.
    """
    if offset == 0:
        _check_head(data[:_HEAD], name)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WakefulError(
            f"{name}: not UTF-8 text at byte {offset + error.start}{_conversion_hint(name)}"
        ) from None
    # Some editors begin a file with a byte order mark, which is not part of its text.
    return text.removeprefix("\ufeff") if offset == 0 else text


def _check_head(head: bytes, name: str | Path) -> None:
    """Raise `WakefulError` where a file's first bytes are those of a compressed format, or have so
    many zeros that the text is in UTF-16 or UTF-32.
    """
    path = str(name)
    for offset, signature, ending, command in _PACKED:
        if head[offset:].startswith(signature):
            # Programs such as gzip unpack only files whose names end as theirs do.
            required = path if path.lower().endswith(ending) else path + ending
            rename = f"mv {shlex.quote(path)} {shlex.quote(required)} && "
            unpack = command.format(shlex.quote(required))
            advice = unpack if required == path else rename + unpack
            raise WakefulError(f"{path} is packed: unpack it: {advice}")
    if 4 * head.count(0) > len(head):  # zero bytes are valid UTF-8, so decoding would not fail
        raise WakefulError(
            f"{path}: not UTF-8 text, but like UTF-16 or UTF-32{_conversion_hint(path)}"
        )


def _conversion_hint(name: str | Path) -> str:
    """Return the part of an error message that says how to convert a file to UTF-8."""
    path, new = shlex.quote(str(name)), shlex.quote(f"{name}.utf8")
    command = f"iconv -f ENCODING -t UTF-8 {path} > {new} && mv {new} {path}"
    return f": convert it ({command}) or leave it out"
