"""The hint that ends a message."""

from pathlib import Path

from wakeful.errors import nearest, nearest_path


def test_the_nearest_word_is_named() -> None:
    assert nearest("diagnos", ["cure", "diagnose"]) == " (did you mean 'diagnose'?)"
    assert nearest("xyz", ["cure", "diagnose"]) == ""
    assert nearest("", ["cure", "diagnose"]) == ""


def test_names_that_begin_with_the_word_come_first() -> None:
    known = ["fig15d", "fig5-lengths", "fig5-sizes", "fig6"]
    assert nearest("fig5", known) == " (did you mean 'fig5-lengths' or 'fig5-sizes'?)"
    assert nearest("fig", known) == " (did you mean 'fig15d', 'fig5-lengths' or 'fig5-sizes'?)"


def test_the_nearest_path_is_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "other").mkdir()
    assert nearest_path(tmp_path / "frist") == f" (did you mean '{tmp_path / 'first'}'?)"
    assert nearest_path(f"{tmp_path}/frist/") == f" (did you mean '{tmp_path / 'first'}'?)"
    # What is there needs no hint, and nothing of these can be looked for.
    assert nearest_path(tmp_path / "first") == ""
    assert nearest_path(tmp_path / "none" / "first") == ""
    assert nearest_path(tmp_path / ("x" * 5000)) == ""
    assert nearest_path(f"{tmp_path}\0/frist") == ""
