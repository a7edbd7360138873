"""Pictures for readers without scripts are small and lose nothing that is seen."""

import base64
import re
import zlib
from urllib.parse import unquote
from xml.etree import ElementTree

import altair as alt
import polars as pl
import pytest
import vl_convert

from pages.synthetic import diagnosis
from wakeful.diagnosis.heads import MAPS, head_map
from wakeful.diagnosis.report import layer_charts
from wakeful.reports.charts import specification, still
from wakeful.reports.pictures import picture, small_png, small_svg

LABEL = 'a <b> & "c" role="d" 0.12345 #5 100%'


def drawn(svg: str) -> tuple[list[str], list[tuple[str, list[float]]]]:
    """Return the texts of a drawing, and the colors and places of all that is filled or lined."""
    words, marks = [], []
    for part in ElementTree.fromstring(svg).iter():
        words += [part.text] if part.tag.endswith("}text") and part.text else []
        inks = [part.get(name, "none") for name in ("fill", "stroke")]
        inks = [re.sub(r"#\w+\)", "#)", ink) for ink in inks]  # gradients are named anew
        color = " ".join(re.sub(r"rgb\((\d+), (\d+), (\d+)\)", hexed, ink) for ink in inks)
        places = part.get("d", "") + part.get("transform", "")
        if color != "none none" and not part.tag.endswith("}g"):
            marks.append((color, [float(n) for n in re.findall(r"-?\d+\.?\d*", places)]))
    return words, marks


def hexed(rgb: re.Match[str]) -> str:
    return "#" + "".join(f"{int(each):02x}" for each in rgb.groups())


def test_a_small_drawing_has_all_texts_and_marks_in_their_places() -> None:
    for chart in (layer_charts([diagnosis("a"), diagnosis("b")])[1].draw(),
                  head_map(diagnosis("a", layers=9), MAPS[2])):  # fmt: skip
        svg = vl_convert.vegalite_to_svg(still(specification(chart)))
        small = small_svg(svg)
        (words, marks), (same_words, same_marks) = drawn(svg), drawn(small)
        assert len(small) < 0.7 * len(svg)
        assert same_words == words
        assert [color for color, _ in same_marks] == [color for color, _ in marks]
        for (_, places), (_, same) in zip(marks, same_marks, strict=True):
            assert len(same) == len(places)
            assert all(abs(n - m) < 0.051 for n, m in zip(places, same, strict=True))


def test_a_label_that_looks_like_markup_stays_as_it_is() -> None:
    chart = alt.Chart(pl.DataFrame({"x": [LABEL]})).mark_point().encode(x="x:N")
    address = picture(specification(chart))
    kind, _, data = address.partition(",")
    assert kind == "data:image/svg+xml"
    assert not re.search('["<>&#]', data)
    assert LABEL in drawn(unquote(data))[0]


def test_dots_are_packed_without_loss() -> None:
    drawn = head_map(diagnosis("a", layers=30, heads=9), MAPS[0])
    svg = vl_convert.vegalite_to_svg(still(specification(drawn)))
    png = vl_convert.svg_to_png(svg, scale=1)
    small = small_png(png)
    assert len(small) < 0.5 * len(png)
    assert vl_convert.svg_to_png(svg, scale=1) == png  # the same every time
    assert pixels(small) == pixels(png)


def pixels(png: bytes) -> tuple[bytes, bytes]:
    """Return a picture's header and its lines, each behind its filter."""
    assert png.startswith(b"\x89PNG\r\n\x1a\n")
    place, parts = 8, {b"IDAT": b""}
    while place < len(png):
        size, kind = int.from_bytes(png[place : place + 4]), png[place + 4 : place + 8]
        data = png[place + 8 : place + 8 + size]
        check = int.from_bytes(png[place + 8 + size : place + 12 + size])
        assert check == zlib.crc32(kind + data)
        parts[kind] = parts.get(kind, b"") + data
        place += 12 + size
    assert kind == b"IEND"
    return parts[b"IHDR"], zlib.decompress(parts[b"IDAT"])


@pytest.mark.slow
def test_what_has_many_marks_is_dots() -> None:
    few, many = diagnosis("a"), diagnosis("a", layers=32, heads=32)
    assert picture(specification(head_map(few, MAPS[0]))).startswith("data:image/svg+xml,")
    address = picture(specification(head_map(many, MAPS[0])))
    kind, _, data = address.partition(",")
    assert kind == "data:image/png;base64"
    assert len(data) < 60_000
    pixels(base64.b64decode(data))
