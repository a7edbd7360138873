"""Presets: the listing and the file itself."""

import pytest

from wakeful.cli import main
from wakeful.cli.verbs import list_presets
from wakeful.config.tables import preset_names, read_preset, read_table


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_begins_with_a_line_that_says_what_it_is(name: str) -> None:
    first = read_preset(name).splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")
    assert len(first) <= 90


def test_what_compares_is_told_from_what_trains_alone() -> None:
    several = [name for name in preset_names() if "variants" in read_table(name)]
    assert list_presets(several=True) == several
    assert list_presets(several=False) == [name for name in preset_names() if name not in several]


def test_presets_are_listed_and_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name}: " in shown for name in preset_names())
    assert main(["presets", "cpu-tiny"]) == 0
    assert capsys.readouterr().out == read_preset("cpu-tiny")
    assert main(["presets", "cpu-tny"]) == 1
    assert "did you mean 'cpu-tiny'" in capsys.readouterr().err
    assert main(["presets", "demo", "arena"]) == 1
    assert "name one preset, not 2" in capsys.readouterr().err
