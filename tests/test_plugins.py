"""The library without the papers on top, and with a package of somebody else's."""

import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from wakeful.cli import main
from wakeful.config import tables
from wakeful.errors import WakefulError
from wakeful.reports.value import Section
from wakeful.training.layouts import layout_of
from wakeful.variants import plugins

ALONE = """
import importlib, importlib.metadata, pkgutil, sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "wakeful_papers":
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Hidden())
found = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **asked: (
    () if asked.get("group", "").startswith("wakeful.") else found(**asked)
)
import wakeful
"""
EVERY_MODULE = """
for module in pkgutil.walk_packages(wakeful.__path__, "wakeful."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            assert error.name == "lm_eval", f"{module.name}: {error}"
"""
VERBS = """
from wakeful.cli import main
for arguments in sys.argv[1:]:
    try:
        status = main(arguments.split())
    except SystemExit as ended:
        status = ended.code
    print(f"{arguments}: {status}")
"""


def alone(program: str, *arguments: str) -> str:
    """Return what a program prints where the papers are not installed."""
    ended = subprocess.run(
        [sys.executable, "-c", ALONE + program, *arguments], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.slow
def test_the_library_imports_whole_without_the_papers() -> None:
    alone(EVERY_MODULE)


@pytest.mark.slow
def test_every_verb_is_there_without_the_papers_and_theirs_is_not(tmp_path: Path) -> None:
    asked = ["--help", "train --help-all", "compare --help", "report --help", "presets",
             "compare patient --only vanilla --help"]  # fmt: skip
    shown = alone(VERBS, *asked)
    assert [f"{each}: 0" in shown for each in asked] == [True] * len(asked)
    assert not any(word in shown.lower() for word in ("reproduce", "exhibit", "arena"))
    assert "unknown verb 'reproduce'" in alone(VERBS, "reproduce")


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install a package that adds a verb, a layout and a preset."""
    package = tmp_path / "somebody"
    (package / "presets").mkdir(parents=True)
    (package / "presets" / "theirs.toml").write_text('# Theirs.\npreset = "cpu-tiny"\n')
    (package / "__init__.py").write_text("")
    (package / "presets" / "__init__.py").write_text("")
    (package / "verb.py").write_text(
        "from wakeful.config.keywords import NoOptions\n"
        "from wakeful.variants.plugins import Verb\n"
        "HELLO = Verb(\n"
        "    summary='Say hello.', usage='[NAME]', argument_help={'NAME': 'whom'}, run=print,\n"
        "    options=NoOptions, examples=(('wakeful hello', 'Says it.'),),\n"
        ")\n"
    )
    (package / "tables.py").write_text(
        "from wakeful.reports.value import Section\n"
        "TABLES = {'mine': lambda comparison: [Section('Mine too', [])]}\n"
    )
    points = {
        "wakeful.verbs": EntryPoint("hello", "somebody.verb:HELLO", "wakeful.verbs"),
        "wakeful.layouts": EntryPoint("x", "somebody.tables:TABLES", "wakeful.layouts"),
        "wakeful.presets": EntryPoint("x", "somebody.presets", "wakeful.presets"),
    }
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [points[group]])
    forget()
    yield package
    monkeypatch.undo()
    forget()


def forget() -> None:
    """Read the entry points again when they are next asked for."""
    plugins.group_entry_points.cache_clear()
    tables._preset_files.cache_clear()


def test_another_packages_verb_layout_and_preset_are_found(
    other: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--help"]) == 0
    assert re.search("hello +Say hello", capsys.readouterr().out)
    assert "theirs" in tables.preset_names()
    assert tables.read_table("theirs") == tables.read_table("cpu-tiny")
    assert main(["hello", "you"]) == 0
    assert capsys.readouterr().out == "['you']\n"
    assert layout_of("mine")(None) == [Section("Mine too", [])]  # pyright: ignore
    with pytest.raises(WakefulError, match=r"layouts: .*'min' \(did you mean 'mine'\?\)"):
        layout_of("min")
