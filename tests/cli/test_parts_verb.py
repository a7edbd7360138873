"""The verb that prints a part as one file, and the names that the package of parts exports."""

from pathlib import Path

import pytest

import wakeful.parts
from wakeful.cli import main
from wakeful.cli.verbs import PARTS

FOLDER = Path(wakeful.parts.__path__[0])


@pytest.mark.parametrize("name", PARTS)
def test_a_part_is_printed_as_it_is(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parts", name]) == 0
    assert capsys.readouterr().out == (FOLDER / f"{name}.py").read_text("utf-8")


def test_every_file_is_a_part_and_every_name_is_exported() -> None:
    assert {*PARTS} == {file.stem for file in FOLDER.glob("*.py")} - {"__init__"}
    for name in wakeful.parts.__all__:
        assert getattr(wakeful.parts, name).__name__ == name


def test_another_part_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["parts", "softmax"]) == 1
    assert "did you mean 'softmax1'" in capsys.readouterr().err
    assert main(["parts"]) == 1
    assert "name one part" in capsys.readouterr().err


@pytest.mark.parametrize("name", PARTS)
def test_a_part_has_licence_citation_and_no_import_but_torch(name: str) -> None:
    text = (FOLDER / f"{name}.py").read_text("utf-8")
    assert "SPDX-License-Identifier: Apache-2.0" in text.splitlines()[0]
    assert "\nCite: " in text
    assert "import wakeful" not in text
    assert "from wakeful" not in text
    assert len(text.splitlines()) < 300
