"""The hint that ends a message."""

from pathlib import Path

from wakeful.errors import did_you_mean, did_you_mean_path


def test_the_nearest_word_is_named() -> None:
    assert did_you_mean("diagnos", ["cure", "diagnose"]) == " (did you mean 'diagnose'?)"
    assert did_you_mean("xyz", ["cure", "diagnose"]) == ""
    assert did_you_mean("", ["cure", "diagnose"]) == ""


def test_names_that_begin_with_the_word_come_first() -> None:
    known = ["fig15d", "fig5-lengths", "fig5-sizes", "fig6"]
    assert did_you_mean("fig5", known) == " (did you mean 'fig5-lengths' or 'fig5-sizes'?)"
    assert did_you_mean("fig", known) == " (did you mean 'fig15d', 'fig5-lengths' or 'fig5-sizes'?)"


def test_the_nearest_path_is_one_beside_it(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "other").mkdir()
    assert did_you_mean_path(tmp_path / "frist") == f" (did you mean '{tmp_path / 'first'}'?)"
    assert did_you_mean_path(f"{tmp_path}/frist/") == f" (did you mean '{tmp_path / 'first'}'?)"
    # What is there needs no hint, and nothing of these can be looked for.
    assert did_you_mean_path(tmp_path / "first") == ""
    assert did_you_mean_path(tmp_path / "none" / "first") == ""
    assert did_you_mean_path(tmp_path / ("x" * 5000)) == ""
    assert did_you_mean_path(f"{tmp_path}\0/frist") == ""
