"""Bytes as text: UTF-8 is read; a packed file, or text in another encoding, is refused with the
command that mends it. And text from elsewhere as a terminal and a page may have it.
"""

import codecs
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
_MARKS = {
    codecs.BOM_UTF32_LE: "UTF-32",
    codecs.BOM_UTF32_BE: "UTF-32",
    codecs.BOM_UTF16_LE: "UTF-16",
    codecs.BOM_UTF16_BE: "UTF-16",
}
_ZEROS = {"0101": "UTF-16LE", "1010": "UTF-16BE", "0111": "UTF-32LE", "1110": "UTF-32BE"}
"""Encodings by which of four bytes are zero in most letters."""
_NOT_WESTERN = frozenset(b"\x81\x8d\x8f\x90\x9d")
"""Bytes that stand for nothing in WINDOWS-1252."""
_HEAD = 4096
_SAMPLE = 2**24
"""Bytes of a file's beginning that an encoding is guessed from."""

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
        sample = data if offset == 0 else _beginning(name) + data
        raise WakefulError(
            f"{name}: not UTF-8 text at byte {offset + error.start}{_remedy(name, sample)} or "
            "leave it out"
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
    parts = (head[start::4] for start in range(4))
    zeros = "".join("01"[2 * part.count(0) > len(part)] for part in parts)
    marked = (kind for mark, kind in _MARKS.items() if head.startswith(mark))
    encoding = next(marked, _ZEROS.get(zeros))
    if encoding:
        raise WakefulError(f"{path} is {encoding}, not UTF-8: {_conversion(path, encoding)}")


def _remedy(name: str | Path, sample: bytes) -> str:
    """Return the likeliest fault, and the command that mends it."""
    replaced = sample.decode("utf-8", "replace")
    if len(re.findall("[^\0-\x7f\ufffd]", replaced)) > replaced.count("\ufffd"):
        return f", though most of it is: drop the rest ({_conversion(name, 'UTF-8', '-c ')})"
    high = sample.translate(None, bytes(range(128)))
    encoding = "WINDOWS-1252" if any(byte < 0xA0 for byte in high) else "ISO-8859-1"
    # Where most letters are not ASCII's, the alphabet may be any.
    if b"\0" in sample or 4 * len(high) > len(sample) or set(high) & _NOT_WESTERN:
        return f" and of no encoding that shows: convert it ({_conversion(name, 'ENCODING')})"
    return f", but like {encoding}: convert it ({_conversion(name, encoding)})"


def _conversion(name: str | Path, encoding: str, more: str = "") -> str:
    path = shlex.quote(str(name))
    new = shlex.quote(f"{name}.utf8")
    return f"iconv {more}-f {encoding} -t UTF-8 {path} > {new} && mv {new} {path}"


def _beginning(name: str | Path) -> bytes:
    with Path(name).open("rb") as file:
        return file.read(_SAMPLE)
