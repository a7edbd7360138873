"""The pages of `--help`: worked examples, then the options under headings."""

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich.text import Text

from wakeful.cli.catalog import baselines, source_catalog
from wakeful.cli.console import OUT
from wakeful.cli.examples import EXAMPLES
from wakeful.config.model import VARIANTS
from wakeful.config.options import Heading, Option, options_of, sections_of
from wakeful.config.refusals import forbidden
from wakeful.config.schema import Config
from wakeful.config.tables import on_preset, own_table, presets
from wakeful.config.verbs import REFERENCES, SHORT, SOURCES
from wakeful.plugins import verb_of

SHOWN, ALL = ("--help", "-h"), ("--help-all", "--help_all")
"""Flags that ask for the usual options, and for all of them."""
IMPORT = Option(
    "import", tuple[str, ...], "Modules of your own that a run or a model names, or their files: "
    "ramp.py. Each is imported only if you name it here.", (), None,
)  # fmt: skip
"""The option of every verb that lets what a folder names be imported."""
USAGE_WORDS = {
    "MODEL": SOURCES,
    "REFERENCE": REFERENCES,
    "RUN": "the folder of a run, a comparison or an inheritance",
    "CONFIG": "a TOML file, or a preset's name (wakeful presets lists them)",
    "SOURCE": "python-stdlib, a file, folder or glob (text, JSONL, parquet), or hf:NAME",
    "DIR": "a folder to create, or a file NAME.gguf",
    "PRESET": "a preset to print, as a starting point for a TOML file of your own",
    "SHELL": "bash, zsh or fish",
}
"""Meanings of the words of a usage line."""
_FROM_WHOLE = ("cure", "quantize", "export")
"""Verbs that refuse quantized models."""
_WIDEST = 100
"""Columns at most: longer lines are hard to read."""
_COLUMN = 28
"""Columns of an option's name at most; a longer one has a line of its own."""
_TIED = "\N{NO-BREAK SPACE}"
_CHOICES = 48
"""Columns of a list of values at most that stands beside an option's name."""
_LETTERS = {int: "N", float: "X"}


def asks_for_help(arguments: Sequence[str]) -> bool:
    return bool({*SHOWN, *ALL} & set(arguments))


def print_help(kind: type, usage: str, arguments: Sequence[str], default: Any = None) -> None:
    """Print the help of a verb whose options these are, all of them where `--help-all` asks."""
    whole = bool(set(ALL) & set(arguments))
    width = min(OUT.width, _WIDEST)
    own = (each for each in sorted(EXAMPLES, reverse=True) if f"{usage} ".startswith(f"{each} "))
    verb = next(own, usage.split(maxsplit=1)[0])
    lines = [*_head(kind, verb, usage, width), *_options(kind, verb, width, whole, default)]
    lines += [*_notes(kind, width), *_names(verb, width, whole)]
    for line in lines:
        OUT.print(line, highlight=False)


def _head(kind: Any, verb: str, usage: str, width: int) -> Iterator[Text]:
    from wakeful.cli import SUMMARIES, all_verbs

    other = None if verb in EXAMPLES else verb_of(verb)
    examples, words = (other.examples, other.words) if other else (EXAMPLES[verb], USAGE_WORDS)
    yield Text(SUMMARIES[verb] if verb in SUMMARIES else all_verbs()[verb])
    yield Text()
    for command, effect in examples:
        yield Text(f"  {command}", style="bold")
        yield from _wrapped(effect, width, 6)
    yield Text()
    yield Text(f"Usage: wakeful {usage}{' [options]' if dataclasses.fields(kind) else ''}")
    for word in usage.split()[1:]:
        name = word.strip("[].")
        if name in words:
            stands = REFERENCES if name == "MODEL" and verb in _FROM_WHOLE else words[name]
            yield from _wrapped(f"{name}: {stands}", width, 2)


def offered(kind: type, default: Any = None) -> list[Option]:
    """Return the options of a verb but those that it would refuse whatever they are set to."""
    own = [each for each in options_of(kind, default) if each.name not in forbidden(kind)]
    return [*own, IMPORT] if own else []


def _options(kind: type, verb: str, width: int, whole: bool, default: Any) -> Iterator[Text]:
    """Yield the options in two columns under their headings."""
    options = offered(kind, default)
    rare = [each for each in options if each.group is None]
    boxes = [(group.value, "", [o for o in options if o.group is group]) for group in Heading]
    if whole:
        described = dict(sections_of(kind))
        for section in dict.fromkeys(each.section for each in rare):
            title = f"Rarely needed: {section}" if section else "Rarely needed"
            within = [each for each in rare if each.section == section]
            boxes.append((title, described.get(section, ""), within))
    written = {o.name: _invocation(o, verb) for _, _, within in boxes for o in within}
    column = 2 + max((len(each) for each in written.values() if len(each) <= _COLUMN), default=0)
    for title, words, within in boxes:
        if within:
            yield Text()
            yield Text(title, style="bold")
            yield from _wrapped(words, width, 2)
        for each in within:
            told = _described(each).replace("runs/VERB-", f"runs/{verb}-")
            yield from _row(written[each.name], told, column, width)
    if rare and not whole:
        yield Text()
        more = "1 more option" if len(rare) == 1 else f"{len(rare)} more options"
        yield Text(f"{more}: wakeful {verb} --help-all")


def _row(left: str, right: str, column: int, width: int) -> Iterator[Text]:
    lines = _lines(right, max(30, width - 2 - column))
    name = Text(f"  {left}", style="bold")
    if len(left) + 2 > column:
        yield name
    elif lines:
        name.append(" " * (column - len(left)))
        yield name.append(Text(lines.pop(0), style="not bold"))
    for line in lines:
        yield Text(" " * (2 + column) + line)


def _invocation(option: Option, verb: str) -> str:
    short = next((each for each, target in SHORT.items() if target == option.name), "")
    name = short if verb == "inherit" and short else option.flag.removeprefix("--")
    if option.kind is bool:
        return option.negative if option.default is True else f"--{name}"
    value = (
        f"{{{','.join(option.choices)}}}"
        if option.choices and not _many(option)
        else _LETTERS.get(option.each, re.split(r"[._]", name)[-1].upper())
    )
    return f"--{name} {value}{' ...' if option.many else ''}"


def _many(option: Option) -> bool:
    """Return whether the values are too many to stand beside the name."""
    return len(",".join(option.choices)) > _CHOICES


def _described(option: Option) -> str:
    words, value = option.words, option.default
    if _many(option):
        words += f" One of {', '.join(option.choices)}."
    if value is dataclasses.MISSING:
        return f"{words} (required)"
    if value is True:
        return f"Turns this off: {words}"
    if value is False or value in ("", ()):
        return words
    if isinstance(value, tuple):
        value = " ".join(repr(each) if each != str(each).strip() else str(each) for each in value)
    value = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{words} {_tied(f'(default: {value})')}"


def _notes(kind: type, width: int) -> Iterator[Text]:
    """Yield the notes on the options as a whole, after the first line."""
    for paragraph in inspect.cleandoc(kind.__doc__ or "").split("\n\n")[1:]:
        yield Text()
        yield from _wrapped(" ".join(paragraph.split()), width, 0)


def _names(verb: str, width: int, whole: bool) -> Iterator[Text]:
    """Yield the names that may be written: presets, variants, baselines."""
    if verb in ("train", "compare"):
        yield from _list("Presets", presets_of(verb), width)
        common = {each.name for each in options_of(Config) if each.group}
        for field, folder in VARIANTS.items():
            if not whole and f"model.{field}" not in common:
                continue
            each = source_catalog(folder)
            shown = map(_tied, each) if whole else (name.partition("(")[0] for name in each)
            yield from _list(f"--model.{field}", shown, width)
    if verb == "quantize":
        schemes = (each.partition("(")[0] for each in source_catalog("quant.schemes", "Scheme"))
        yield from _list("--scheme", schemes, width)
    if verb == "inherit":
        shown = baselines() if whole else (each.partition(":")[0] for each in baselines())
        yield from _list("--baseline", shown, width, "; " if whole else ", ")


def _tied(words: str) -> str:
    """Return words that stay on one line."""
    return words.replace(" ", _TIED)


def presets_of(verb: str) -> list[str]:
    """Return the presets that are for `train`, or those of several variants, for `compare`."""
    several = {name: "variants" in on_preset(own_table(name), name) for name in presets()}
    return [name for name in several if several[name] == (verb == "compare")]


def _list(title: str, names: Iterable[str], width: int, between: str = ", ") -> Iterator[Text]:
    yield Text()
    yield Text(title, style="bold")
    yield from _wrapped(between.join(names), width, 2)


def _wrapped(words: str, width: int, indent: int) -> Iterator[Text]:
    for line in _lines(words, width - indent):
        yield Text(" " * indent + line)


def _lines(words: str, width: int) -> list[str]:
    wrapped = textwrap.wrap(words, width, break_on_hyphens=False, break_long_words=False)
    return [line.replace(_TIED, " ") for line in wrapped]
