"""Every figure that an exhibit shows is explained in a line."""

import pytest

from wakeful.reports.terms import explain
from wakeful_papers.exhibits.exhibit import exhibit_names, read_exhibit

PLAIN = {"losses", "steps_per_second", "training_megabytes", "parameters"}
"""Everyday words that need no line."""


@pytest.mark.parametrize("name", exhibit_names())
def test_every_figure_and_drawing_of_an_exhibit_is_explained(name: str) -> None:
    shown = read_exhibit(name)
    said = {*shown.draw, *(column.figure for column in shown.table.columns)}
    without = {each for each in said if not explain(each)}
    assert {each for each in without if not any(word in each for word in PLAIN)} == set()


@pytest.mark.parametrize("name", exhibit_names())
def test_every_column_of_a_layout_is_explained(name: str) -> None:
    without = {each.figure for each in read_exhibit(name).table.columns if not explain(each.figure)}
    assert without <= PLAIN
