"""The names that may be written for variants and baselines, read from the source: without torch."""

import ast
from collections.abc import Iterator, Sequence
from importlib import resources


def catalog(folder: str) -> Iterator[str]:
    """Yield what a user may write for a folder of variants, read from its source.

    `variants.catalog` says the same of the imported classes, and needs torch for that.
    """
    bodies: dict[str, ast.ClassDef] = {}
    names: dict[str, str] = {}
    for file in sorted((resources.files("wakeful") / folder).iterdir(), key=lambda f: f.name):
        if not file.name.endswith(".py"):
            continue
        for node in ast.parse(file.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                bodies[node.name] = node
                said = dict(_assigned(node))
                if "examples" in said:
                    name = said.get("name")
                    names[node.name] = node.name.lower() if name is None else ast.literal_eval(name)
    for kind, name in names.items():
        options = ", ".join(_options(kind, bodies))
        yield f"{name}({options})" if options else name


def _assigned(body: ast.ClassDef | ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a body gives a value, and the values."""
    for node in body.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                yield ast.unparse(target), node.value


def _options(kind: str, bodies: dict[str, ast.ClassDef]) -> Iterator[str]:
    """Yield the options of a class's constructor, or of the first base's that has one."""
    body = bodies.get(kind)
    if body is None:
        return
    for node in body.body:
        if isinstance(node, ast.FunctionDef) and node.name == "__init__":
            yield from _arguments(node.args)
            return
    for base in body.bases:
        yield from _options(ast.unparse(base), bodies)


def _arguments(found: ast.arguments) -> Iterator[str]:
    def told(names: list[ast.arg], defaults: Sequence[ast.expr | None]) -> Iterator[str]:
        for argument, default in zip(names, defaults, strict=True):
            yield argument.arg if default is None else f"{argument.arg}={ast.unparse(default)}"

    plain = [*found.posonlyargs, *found.args][1:]
    yield from told(plain, [None] * (len(plain) - len(found.defaults)) + found.defaults)
    if found.vararg:
        yield f"*{found.vararg.arg}"
    yield from told(found.kwonlyargs, found.kw_defaults)


def baselines() -> Iterator[str]:
    """Yield the starts that an heir may be compared with, as their table's source names them."""
    source = (resources.files("wakeful") / "heirs" / "baselines.py").read_text("utf-8")
    table = dict(_assigned(ast.parse(source)))["BASELINES"]
    assert isinstance(table, ast.Dict)
    for key, value in zip(table.keys, table.values, strict=True):
        assert isinstance(value, ast.Call)
        assert key is not None
        yield f"{ast.literal_eval(key)}: {ast.literal_eval(value.args[0])}"
