"""The pages of exhibits and of claims keep the rules of every page."""

from pathlib import Path

import pytest

import wakeful
from exhibit_pages import reproduction
from pages.test_pages_structure import (
    test_a_browser_draws_every_chart_without_an_error,
    test_a_page_begins_with_a_verdict_and_says_what_to_do_next,
    test_every_part_is_in_the_contents,
    test_no_hyphen_stands_for_a_minus,
)
from test_claims import written

__all__ = [
    "test_a_browser_draws_every_chart_without_an_error",
    "test_a_page_begins_with_a_verdict_and_says_what_to_do_next",
    "test_every_part_is_in_the_contents",
    "test_no_hyphen_stands_for_a_minus",
]


def _claims(folder: Path) -> Path:
    judged = written(folder, "a/fig1", "First", "confirmed", "not resolved")
    return wakeful.report(judged, out=folder / "page.html").page


@pytest.fixture(scope="module", params=["exhibit", "claims"])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the page of each kind, built once."""
    folder = tmp_path_factory.mktemp("page")
    if request.param == "claims":
        return _claims(folder)
    return reproduction(folder / "page.html")
