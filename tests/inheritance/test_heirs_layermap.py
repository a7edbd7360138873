"""Layer maps: which blocks a target takes."""

import pytest

from wakeful.errors import WakefulError
from wakeful.inheritance.layers import LayerMap, first, named_layers
from wakeful.layer_ranges import format_layers


def test_what_is_refused() -> None:
    with pytest.raises(WakefulError, match="layers = 31 is more than the reference's 30"):
        first(31, of=30)
    with pytest.raises(WakefulError, match="at least 1"):
        first(0, of=30)
    with pytest.raises(WakefulError, match="wants layer 30, and the reference has the layers 0 to"):
        named_layers([0, 30], of=30)
    with pytest.raises(WakefulError, match="counted from 0"):
        LayerMap((-1,), "named")
    with pytest.raises(WakefulError, match="at least 1 layer"):
        LayerMap((), "named")


def test_layers_are_written_in_runs() -> None:
    assert format_layers(range(15)) == "0–14"
    assert format_layers([0, 2, 3, 4, 9]) == "0, 2–4, 9"
