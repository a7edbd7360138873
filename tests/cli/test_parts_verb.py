"""The verb that prints a part as one file, and the names that the package of parts exports."""

import ast
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
    assert count_code_lines(text) <= 220  # short enough to be copied and read


def count_code_lines(text: str) -> int:
    """Return the number of lines of a module that are code: docstrings, comments and blank lines
    explain it and do not count.
    """
    explained = set[int]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            explained |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return sum(
        number not in explained and bool(line.strip()) and not line.strip().startswith("#")
        for number, line in enumerate(text.splitlines(), 1)
    )
