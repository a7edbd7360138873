"""Every `wakeful` command of README, the docs, the examples and help is one that is taken.

Options, values and presets are parsed as they are in use; the verb behind them is not called.
Files that a page speaks of stand there as a preset's (`mine.toml`), runs and models as their names.
"""

import itertools
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

import wakeful
from wakeful.cli import verbs

ROOT = Path(__file__).parents[1]
PAGES = [
    page
    for place in ("*.md", "docs/*.md", "papers/*.md", "papers/docs/*.md", "examples/*.py")
    for page in sorted(ROOT.glob(place))
]
BLOCK = re.compile(
    r"```(?:sh|bash|console)\n(?P<fenced>.*?)```|(?P<indented>(?:^    .*\n)+)", re.S | re.M
)
BEGINS = re.compile(r"(?:\s|\w+=\S+ |torchrun .* )*wakeful [a-z]")
INLINE = re.compile(r"`(wakeful (?:data )?[a-z]+ [^-`][^`]+)`")
"""A command in a sentence; one that goes straight on to an option names that option only."""
PLACEHOLDER = re.compile(r"\b[A-Z][A-Z/_]+\b|\.\.\.|…")
"""What stands for something else: a command with it is a form, not a command."""
SEPARATORS = {"|", "&&", ";", "||", "&", ">", "2>"}


class Parsed(Exception):
    """The command was taken."""


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words after `wakeful` of each command of a page."""
    text = page.read_text("utf-8")
    blocks = [found["fenced"] or found["indented"] for found in BLOCK.finditer(text)]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    for line in [*lines, *(found.group(1) for found in INLINE.finditer(text))]:
        if not BEGINS.match(line):
            continue
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words = list(lexer)
        while "wakeful" in words:
            words = words[words.index("wakeful") + 1 :]
            end = next((n for n, word in enumerate(words) if word in SEPARATORS), len(words))
            command, words = words[:end], words[end:]
            if (
                command
                and command[0] in verbs.all_verbs()
                and not PLACEHOLDER.search(" ".join(command))
            ):
                yield command


@pytest.fixture(autouse=True)
def behind_the_command_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Put something that only says it was called behind every verb, in a folder with some files."""

    def taken(*_args: object, **_more: object) -> None:
        raise Parsed

    public = ("train", "diagnose", "inherit", "cure", "evaluate", "quantize", "report", "export")
    for name in public:
        monkeypatch.setattr(wakeful, name, taken)
    for name in (
        "training.comparison", "generation.tool",
    ):  # fmt: skip
        stub = ModuleType(f"wakeful.{name}")
        stub.__getattr__ = lambda _name: taken  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, stub.__name__, stub)
    papers = ModuleType("wakeful_papers.verbs.reproduce")
    papers.__getattr__ = lambda _name: taken  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, papers.__name__, papers)
    preparing = ModuleType("wakeful.data.preparing")
    preparing.prepare = taken  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, preparing.__name__, preparing)
    monkeypatch.chdir(tmp_path)


def asked_for(words: list[str]) -> list[str]:
    """Return the variants that --only names."""
    after = words[words.index("--only") + 1 :] if "--only" in words else []
    return [*itertools.takewhile(lambda word: not word.startswith("-"), after)]


def problem(command: list[str]) -> str:
    """Return what the command line has against a command; "" if it takes it."""
    verb, *rest = command
    for word in rest:
        if word.endswith(".toml") and not word.startswith("-"):
            Path(word).parent.mkdir(parents=True, exist_ok=True)
            rows = [Path(word).stem, *asked_for(rest)] if verb == "compare" else []
            tables = "".join(f"[variants.{row}]\n" for row in rows)
            Path(word).write_text(f'preset = "cpu-tiny"\n{tables}', "utf-8")
    try:
        verbs.find_verb(verb).run(rest)
    except Parsed:
        return ""
    except SystemExit as ended:
        return "" if ended.code in (0, None) else f"ends with {ended.code}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [page for page in PAGES if any(commands(page))], ids=lambda p: p.name
)
def test_every_command_of_a_page_is_taken(page: Path, capsys: pytest.CaptureFixture) -> None:
    found = {shlex.join(command): problem(command) for command in commands(page)}
    assert {command: wrong for command, wrong in found.items() if wrong} == {}


@pytest.mark.slow
@pytest.mark.parametrize("verb", verbs.all_verbs())
def test_the_examples_of_help_are_taken(verb: str, capsys: pytest.CaptureFixture) -> None:
    for command, effect in verbs.all_verbs()[verb].examples:
        assert f"{command} ".startswith(f"wakeful {verb} ")
        assert problem(shlex.split(command.partition(" > ")[0])[1:]) == "", command
        assert effect.endswith(".")


def test_commands_are_found() -> None:
    found = [command for page in PAGES for command in commands(page)]
    assert len(found) > 100
    assert {command[0] for command in found} >= {"diagnose", "cure", "train", "compare", "inherit"}


def test_a_wrong_option_is_seen() -> None:
    assert "Did you mean --scheme?" in problem(["quantize", "smollm2", "--schemes", "w4"])
    assert problem(["train", "no-such-preset"])
    assert not problem(["train", "cpu-tiny", "--train.steps", "5"])
