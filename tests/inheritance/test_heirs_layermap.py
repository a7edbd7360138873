"""Layer maps: which blocks a target takes."""

import pytest

from wakeful.errors import WakefulError
from wakeful.inheritance.layers import (
    RANGES,
    LayerMap,
    alternate,
    first,
    last,
    middle,
    named_layers,
    parse_layers,
    stacked,
)
from wakeful.layer_ranges import format_layers


def test_the_papers_examples() -> None:
    assert first(16, of=24).sources == tuple(range(16))
    # Table 4: layers 1-4, 5-8 and 9-12 of 12, counted from 1.
    assert [m(4, of=12).sources for m in (first, middle, last)] == [
        (0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11),
    ]  # fmt: skip
    # Appendix B: the DistilBERT-style student of 16 of 24, and stacking 9 layers to 18.
    assert alternate(16, of=24).sources == (*range(0, 24, 2), 18, 19, 20, 21)
    assert alternate(12, of=24).sources == tuple(range(0, 24, 2))
    assert stacked(18, of=36).sources == (*range(9), *range(9))


def test_odd_depths() -> None:
    assert stacked(15, of=30).sources == (*range(8), *range(7))
    assert stacked(1, of=1).sources == (0,)
    assert alternate(3, of=12).sources == (0, 4, 8)
    assert alternate(15, of=30).sources == tuple(range(0, 30, 2))
    assert alternate(4, of=4).sources == (0, 2, 0, 1)
    assert alternate(3, of=5).sources == (0, 2, 4)
    assert alternate(14, of=27).sources == tuple(range(0, 27, 2))


@pytest.mark.parametrize("name", RANGES)
def test_every_map_has_the_depth_it_is_asked_for(name: str) -> None:
    for of in (1, 2, 5, 30):
        for depth in range(1, of + 1):
            layers = RANGES[name](depth, of=of)
            assert len(layers) == depth
            layers.check(of)


def test_what_is_refused() -> None:
    for make in (first, middle, last, alternate, stacked):
        with pytest.raises(WakefulError, match="layers = 31 is more than the reference's 30"):
            make(31, of=30)
        with pytest.raises(WakefulError, match="at least 1"):
            make(0, of=30)
    with pytest.raises(WakefulError, match="wants layer 30, and the reference has the layers 0 to"):
        named_layers([0, 30], of=30)
    with pytest.raises(WakefulError, match="counted from 0"):
        LayerMap((-1,), "named")
    with pytest.raises(WakefulError, match="at least 1 layer"):
        LayerMap((), "named")


@pytest.mark.parametrize("layers", [[0], [0, 2, 3, 4, 9], list(range(15)), []])
def test_layers_that_are_written_are_read(layers: list[int]) -> None:
    assert parse_layers([format_layers(layers)]) == layers
    assert parse_layers(format_layers(layers).replace("–", "-").split(", ")) == layers


@pytest.mark.parametrize("part", ["2-0", "a", "-1", "1-", "1..3", "9" * 9])
def test_other_words_are_no_layers(part: str) -> None:
    with pytest.raises(WakefulError, match="layers are written as 0-2 18-29, got"):
        parse_layers(["0-2", part])


def test_layers_are_written_in_runs() -> None:
    assert format_layers(range(15)) == "0–14"
    assert format_layers([0, 2, 3, 4, 9]) == "0, 2–4, 9"
    assert str(first(2, of=3)) == "first (0–1)"
