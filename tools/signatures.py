"""Write src/wakeful/__init__.pyi, the public functions with typed keyword arguments, from their
options; with --check, say if it is stale.
"""

import dataclasses
import inspect
import sys
import textwrap
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import wakeful
from wakeful.config.keywords import short_names
from wakeful.config.options import Heading, Option, iterate_options
from wakeful.curing.options import CureOptions
from wakeful.diagnosis.options import DiagnoseOptions
from wakeful.evaluation.options import EvaluateOptions
from wakeful.exporting.options import ExportOptions
from wakeful.generation.options import GenerateOptions
from wakeful.inheritance.options import InheritOptions
from wakeful.quantization.options import QuantizeOptions

FILE = Path(__file__).resolve().parent.parent / "src" / "wakeful" / "__init__.pyi"
OPTIONS: dict[str, type] = {
    "diagnose": DiagnoseOptions, "cure": CureOptions, "evaluate": EvaluateOptions,
    "quantize": QuantizeOptions, "inherit": InheritOptions, "generate": GenerateOptions,
    "export": ExportOptions,
}  # fmt: skip
"""Functions whose keyword arguments are the fields of a dataclass."""
SOURCES: dict[str, tuple[tuple[str, str], ...]] = {
    "diagnose": (("*models: Source", "Diagnosis"),),
    "cure": (("model: Source, *", "Cure"),),
    "evaluate": (("*models: Source", "Evaluation"),),
    "quantize": (
        ("model: Source, *schemes: str | Scheme", "Quantization"),
        ("model: Sequence[Source], *schemes: str | Scheme", "QuantizationMatrix"),
    ),
    "inherit": (("reference: Source | None = None, *", "Inheritance"),),
    "generate": (("model: Source, prompt: str, *", "str"),),
    "export": (("model: Source, folder: str | PathLike[str], *", "str"),),
}
"""What each takes besides its options, and what it returns; one entry an overload."""
HEAD = '''"""The public functions with their options as keyword arguments.

python tools/signatures.py writes this file from the dataclasses of options.
"""

from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import Any, Literal, overload

from wakeful.config.schema import {parts}
from wakeful.curing.options import CureOptions
from wakeful.diagnosis.options import DiagnoseOptions
from wakeful.evaluation.options import EvaluateOptions
from wakeful.exporting.options import ExportOptions
from wakeful.generation.options import GenerateOptions
from wakeful.inheritance.options import InheritOptions
from wakeful.quantization.options import QuantizeOptions
from wakeful.terminal.display import DisplayFactory
from wakeful.errors import WakefulError as WakefulError
from wakeful.loading.load import load as load
from wakeful.loading.model import AnyTokenizer
from wakeful.probes.watch import watch as watch
from wakeful.quantization.schemes import Scheme
from wakeful.training.comparison import compare as compare
from wakeful.curing.tool import Cure
from wakeful.diagnosis.tool import Diagnosis
from wakeful.evaluation.tool import Evaluation
from wakeful.inheritance.result import Inheritance
from wakeful.quantization.result import Quantization, QuantizationMatrix
from wakeful.reporting.tool import report as report
from wakeful.loading.sources import Source
from wakeful.training.tool import train as train
from wakeful.version import __version__ as __version__

__all__: Sequence[str]
Tokenizer = AnyTokenizer | str | PathLike[str] | None
'''


def stub() -> str:
    """Return the file."""
    functions = [function(name, kind) for name, kind in OPTIONS.items()]
    kinds = {kind for each in OPTIONS.values() for kind in typing.get_type_hints(each).values()}
    parts = sorted(kind.__name__ for kind in kinds if dataclasses.is_dataclass(kind))
    return "\n".join([HEAD.replace("{parts}", ", ".join(parts)), *functions])


def function(name: str, kind: type) -> str:
    """Return the overloads of a function."""
    documented: Callable[..., Any] = getattr(wakeful, name)
    options = list(keywords(kind))
    words = textwrap.indent("\n".join(described(documented, options)), "    ")
    lines: list[str] = []
    for source, result in SOURCES[name]:
        parameters = [*source.split(", "), "tokenizer: Tokenizer = None",
                      f"options: {kind.__name__} | None = None"]  # fmt: skip
        if name != "generate":
            parameters.insert(-1, "display: DisplayFactory | None = None")
        parameters += [
            f"{option.name}: {annotation(option)} = {default(option)}" for option in options
        ]
        lines += ["@overload"] * (len(SOURCES[name]) > 1)
        lines += [f"def {name}(", *(f"    {parameter}," for parameter in parameters)]
        lines += [f") -> {result}:", f'    """{words.strip()}', '    """', ""]
    return "\n".join(lines)


def keywords(kind: type) -> Iterator[Option]:
    """Yield the options at the top of a dataclass, parts as a whole, then its short names."""
    hints = typing.get_type_hints(kind)
    flat = {option.name: option for option in iterate_options(kind)}
    for entry in dataclasses.fields(kind):
        if dataclasses.is_dataclass(hints[entry.name]):
            words = f"Fields of `{hints[entry.name].__name__}`, or a table of them."
            yield Option(entry.name, hints[entry.name], words, None, None)
        else:
            yield flat[entry.name]
    for short, target in short_names(kind).items():
        yield dataclasses.replace(flat[target], name=short, default=None)


def annotation(option: Option) -> str:
    """Return the type of an option as a caller may write it."""
    if dataclasses.is_dataclass(option.kind):
        return f"{typing.cast(type, option.kind).__name__} | Mapping[str, Any]"
    where = option.group is Heading.WHERE and option.name != "device"
    text = _type(option.value_type, path=where or "text" in option.name)
    return f"Iterable[{text}] | {text}" if option.takes_several else text


def default(option: Option) -> str:
    """Return the default of an option as source has it, or dots."""
    plain = isinstance(option.default, str | int | float | tuple)
    return _quoted(option.default) if plain and not option.name.startswith("_") else "..."


def _quoted(value: object) -> str:
    text = repr(value)
    return text.replace("'", '"') if '"' not in text else text


def _type(kind: Any, *, path: bool) -> str:
    if typing.get_origin(kind) is Literal:
        return f"Literal[{', '.join(map(_quoted, typing.get_args(kind)))}]"
    return "str | PathLike[str]" if kind is str and path else kind.__name__


def described(function: Callable[..., Any], options: list[Option]) -> Iterator[str]:
    """Yield the lines of a function's docstring, its options described each once."""
    text = inspect.getdoc(function) or ""
    before, mark, after = text.partition("\n    options:")
    yield from before.splitlines()
    if mark:
        rest = after.partition("\n")[2]
        for option in options:
            yield from textwrap.wrap(
                f"{option.name}: {option.description}", 92, initial_indent="    ",
                subsequent_indent="        ",
            )  # fmt: skip
        yield from rest.splitlines()


def main(arguments: list[str]) -> int:
    """Return 0 where the file is as the options are, or has become so."""
    text = stub()
    if "--check" in arguments:
        stale = not FILE.exists() or FILE.read_text("utf-8") != text
        if stale:
            print("src/wakeful/__init__.pyi is stale: run python tools/signatures.py")
        return int(stale)
    FILE.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
