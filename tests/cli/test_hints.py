"""The hint that ends a message."""

from pathlib import Path

from wakeful.errors import nearest, nearest_path


def test_the_nearest_word_is_named() -> None:
    assert nearest("diagnos", ["cure", "diagnose"]) == " (did you mean 'diagnose'?)"
    assert nearest("xyz", ["cure", "diagnose"]) == ""


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
