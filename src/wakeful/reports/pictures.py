"""Pictures of a page's charts, for readers whose scripts are off.

Every chart in the open has one; those in details have none, because a page has many of them.
"""

import base64
import re
import zlib
from collections.abc import Mapping
from typing import Any

import vl_convert

from wakeful.reports.charts import still

_WIDTH = 480
_LARGE = 20_000
"""Characters of a drawing; a larger one may be smaller as dots."""
_TAG = re.compile(r"<[a-z][^<>]*>", re.I)
_IDLE = re.compile(
    r' (?:class|role|aria-[a-z]+|pointer-events)="[^"]*"| (?:opacity|stroke-width)="1"'
)
"""Attributes that change nothing that is seen."""
_FONT = re.compile(r' font-family="([^"]*)"')
_PLACES = re.compile(r' (?:d|transform)="[^"]*"')
_LONG = re.compile(r"-?\d+\.\d{2,}")
_NAME = re.compile(r'(?<=id="|rl\(#)[a-z_]+\d+')
"""Of a gradient or a clip, where it is given or used."""
_RGB = re.compile(r"rgb\((\d+), (\d+), (\d+)\)")
_UNSEEN = re.compile(r"<path d='[^']*'(?: display='none')?/>")
"""A path without a color."""


def picture(spec: Mapping[str, Any]) -> str:
    """Return a chart as an image's address: a drawing, or dots where those are fewer characters."""
    alone = still(dict(spec), _WIDTH)
    alone["config"]["aria"] = False
    svg = vl_convert.vegalite_to_svg(alone)
    # An address stands in double quotes, and these signs mean something in it.
    escaped = re.sub('[%#&"<>]', lambda sign: f"%{ord(sign[0]):02X}", small_svg(svg))
    drawing = f"data:image/svg+xml,{escaped}"
    if len(drawing) < _LARGE:
        return drawing
    png = base64.b64encode(small_png(vl_convert.svg_to_png(svg, scale=1))).decode()
    return min(drawing, f"data:image/png;base64,{png}", key=len)


def small_svg(svg: str) -> str:
    """Return the same drawing in half the characters: to a tenth of a pixel, without what only
    scripts and screen readers use, and with the font said once.
    """
    font, names = _FONT.search(svg), dict[str, str]()
    svg = _TAG.sub(lambda tag: _small_tag(tag[0], names), svg)
    if font:
        # Names of several words are names without quotes, too.
        family = font[1].replace("'", "")
        svg = svg.replace("<svg", f"<svg font-family='{family}'", 1)
    return _UNSEEN.sub("", svg)


def _small_tag(tag: str, names: dict[str, str]) -> str:
    tag = _IDLE.sub("", _FONT.sub("", tag))
    # The library counts what it draws: the same drawing would be another the next time.
    tag = _NAME.sub(lambda name: names.setdefault(name[0], f"n{len(names)}"), tag)
    tag = _PLACES.sub(lambda places: _LONG.sub(_tenth, places[0]), tag)
    tag = _RGB.sub(lambda rgb: "#" + bytes(map(int, rgb.groups())).hex(), tag)
    return tag.replace('"', "'")


def _tenth(number: re.Match[str]) -> str:
    return f"{float(number[0]):.1f}".removesuffix(".0")


def small_png(png: bytes) -> bytes:
    """Return the same picture with its dots packed as tightly as zlib can, which vl-convert does
    not: a quarter of the bytes.

    PNG (ISO/IEC 15948): a signature, then chunks of a length, a kind, data and a checksum.
    """
    offset, parts, dots = 8, [], b""
    while offset < len(png):
        size = int.from_bytes(png[offset : offset + 4])
        kind, data = png[offset + 4 : offset + 8], png[offset + 8 : offset + 8 + size]
        if kind == b"IDAT":
            dots += data
        else:
            parts.append((kind, data))
        offset += size + 12
    parts.insert(-1, (b"IDAT", zlib.compress(zlib.decompress(dots), 9)))
    return png[:8] + b"".join(
        len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4)
        for kind, data in parts
    )
