"""The names that may be written for variants and baselines, read from the source: without torch."""

import ast
from collections.abc import Iterator, Sequence
from importlib import resources

from wakeful.config.model import VARIANTS
from wakeful.config.options import Option
from wakeful.errors import WakefulError, nearest

_FOLDERS = {f"model.{field}": folder for field, folder in VARIANTS.items()} | {
    "route": "routes", "normalizer": "normalizers", "rotate": "optim.rotations",
    "optimizer.rotation": "optim.rotations", "scheme": "quant.schemes",
    "train.quantize.schemes": "quant.schemes",
}  # fmt: skip
"""Options whose values are expressions, and the variants that these name."""
_TABLES = {"baseline": ("heirs/baselines.py", "BASELINES"),
           "optimizer.name": ("optim/build.py", "BUILDERS")}  # fmt: skip
"""Options whose values name an entry of a table, and its source."""


def check_name(option: Option, values: Sequence[str]) -> None:
    """Raise `WakefulError` where a value of an option names a variant or baseline that there is
    not: at once, where the verb would import torch first.
    """
    if option.name == "baseline" and option.kind is str:
        return  # a variant of the user's own comparison
    if option.name in _TABLES:
        known = [*_table(*_TABLES[option.name])]
    elif option.name in _FOLDERS:
        folder = _FOLDERS[option.name]
        kind = "Scheme" if folder == "quant.schemes" else ""  # grids are in that folder too
        known = [each.partition("(")[0] for each in source_catalog(folder, kind)]
    else:
        return
    for value in values:
        name = value.partition("(")[0].strip()
        if name.isidentifier() and name not in known:
            named = (each for each in known if each != "scheme")  # which must be told of what
            raise WakefulError(
                f"{option.name}={name!r} is not one of {', '.join(named)}{nearest(name, known)}"
            )


def source_catalog(folder: str, kind: str = "") -> Iterator[str]:
    """Yield the expressions for a folder of variants, read from its source; with `kind` of
    the classes alone that come from the one of that name.
    """
    bodies: dict[str, ast.ClassDef] = {}
    names: dict[str, str] = {}
    place = resources.files("wakeful").joinpath(*folder.split("."))
    for file in sorted(place.iterdir(), key=lambda f: f.name):
        if not file.name.endswith(".py"):
            continue
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                bodies[node.name] = node
                said = dict(_assigned(node))
                if "examples" in said:
                    name = said.get("name")
                    names[node.name] = node.name.lower() if name is None else ast.literal_eval(name)
    for each, name in names.items():
        if not kind or kind in _ancestry(each, bodies):
            options = _options(each, bodies)
            yield f"{name}({options})" if options else name


def _assigned(body: ast.ClassDef | ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a body gives a value, and the values."""
    for node in body.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield ast.unparse(target), node.value


def _ancestry(kind: str, bodies: dict[str, ast.ClassDef]) -> Iterator[str]:
    """Yield the name of a class and of all that it comes from."""
    yield kind
    for base in bodies[kind].bases if kind in bodies else ():
        yield from _ancestry(ast.unparse(base), bodies)


def _options(kind: str, bodies: dict[str, ast.ClassDef]) -> str:
    """Return the options of a class's constructor, or of the first base's that has one."""
    for name in _ancestry(kind, bodies):
        for node in bodies[name].body if name in bodies else ():
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                return _arguments(node.args)
    return ""


def _arguments(found: ast.arguments) -> str:
    """Return what a constructor takes besides `self`, with defaults and without types."""
    for each in ast.walk(found):
        if isinstance(each, ast.arg):
            each.annotation = None
    return ast.unparse(found).removeprefix("self").removeprefix(", ").replace("*, ", "")


def baselines() -> Iterator[str]:
    """Yield the starts that an heir may be compared with, as their table's source names them."""
    for name, value in _table(*_TABLES["baseline"]).items():
        assert isinstance(value, ast.Call)
        yield f"{name}: {ast.literal_eval(value.args[0])}"


def _table(file: str, name: str) -> dict[str, ast.expr]:
    """Return the entries of a table in one of our source files."""
    source = (resources.files("wakeful") / file).read_text("utf-8")
    table = dict(_assigned(ast.parse(source)))[name]
    assert isinstance(table, ast.Dict)
    return {
        ast.literal_eval(key): value
        for key, value in zip(table.keys, table.values, strict=True)
        if key
    }
