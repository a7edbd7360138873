"""Bytes as text: UTF-8 is read; a packed file, or text in another encoding, is refused with the
command that mends it. And text from elsewhere as a terminal and a page may have it.
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
"""Where a packed file has which bytes, the ending that its program asks for, and the command."""
_HEAD = 4096

_STEERING = re.compile(
    "[\0-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)
"""Control characters (C0, DEL, C1), line ends, marks of writing direction and half characters."""


def visible(text: str, *, keep: str = "") -> str:
    """Return a text without what steers a terminal: a control character is drawn as its symbol (␛),
    any other as �. Those in `keep` stay.
    """

    def drawn(match: re.Match[str]) -> str:
        letter = match[0]
        if letter in keep:
            return letter
        return "␡" if letter == "\x7f" else chr(0x2400 + ord(letter)) if letter < " " else "�"

    return _STEERING.sub(drawn, text)


def markdown(text: object) -> str:
    """Return text within one line of Markdown, where it begins no link, element, code or block."""
    line = re.sub(r"([\\`*\[\]<>|])", r"\\\1", visible(str(text)).strip())
    return re.sub("^([#+=~-])", r"\\\1", line)


def decoded(data: bytes, name: str | Path, *, offset: int = 0) -> str:
    """Return UTF-8 as text, without a byte order mark; `data` begins at `offset` of what is named.

    Raises:
        WakefulError: it is packed or in another encoding.
    """
    if offset == 0:
        _check_head(data[:_HEAD], name)
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise WakefulError(
            f"{name}: not UTF-8 text at byte {offset + error.start}{_conversion(name)}"
        ) from None
    # Some editors begin a file with a byte order mark, which is not part of its text.
    return text.removeprefix("\ufeff") if offset == 0 else text


def _check_head(head: bytes, name: str | Path) -> None:
    path = str(name)
    for place, signature, ending, command in _PACKED:
        if head[place:].startswith(signature):
            right = path if path.lower().endswith(ending) else path + ending
            rename = "" if right == path else f"mv {shlex.quote(path)} {shlex.quote(right)} && "
            unpack = command.format(shlex.quote(right))
            raise WakefulError(f"{path} is packed: unpack it: {rename}{unpack}")
    if 4 * head.count(0) > len(head):  # most of which would be characters all the same
        raise WakefulError(f"{path}: not UTF-8 text, but like UTF-16 or UTF-32{_conversion(path)}")


def _conversion(name: str | Path) -> str:
    path, new = shlex.quote(str(name)), shlex.quote(f"{name}.utf8")
    command = f"iconv -f ENCODING -t UTF-8 {path} > {new} && mv {new} {path}"
    return f": convert it ({command}) or leave it out"
