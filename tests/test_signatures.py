"""Public functions: every option of the command line is a keyword of the function, and typed."""

import inspect
from typing import Any

import pytest

import wakeful
from tool import tool_of
from wakeful.cli.command import list_options
from wakeful.cli.verbs import VERBS
from wakeful.inheritance.options import SHORT_NAMES

TOOL = tool_of("signatures")
BESIDES = {"models", "model", "schemes", "reference", "prompt", "folder", "tokenizer", "display",
           "options"}  # fmt: skip
"""Parameters that Python alone has."""


def test_the_stub_is_written_from_the_options() -> None:
    assert TOOL.main(["--check"]) == 0


@pytest.mark.parametrize("name", TOOL.OPTIONS)
def test_options_and_keywords_are_the_same(name: str) -> None:
    function: Any = getattr(wakeful, name)
    keywords = set(inspect.signature(function).parameters) - BESIDES
    flags = {option.name.partition(".")[0] for option in list_options(VERBS[name].options)}
    flags |= set(SHORT_NAMES) if name == "inherit" else set()
    assert keywords == flags - {"import", "prompt"}
    for option in list_options(VERBS[name].options):
        parameter = inspect.signature(function).parameters.get(option.name)
        if parameter is not None and option.name not in BESIDES:
            assert parameter.default == option.default, option.name
