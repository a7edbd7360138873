"""The code that an exported model carries: copies of the files it needs, flat beside its weights.

Transformers loads them with `trust_remote_code=True` where `wakeful` is not installed. It copies a
model's files by the relative imports it finds in them and knows no folders, so
`wakeful.model.decoder` becomes `wakeful__model__decoder.py`. Only the variants that the model uses
go along; a user's own come with the modules of theirs that they import.
"""

import ast
import importlib
import importlib.util
import inspect
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType

from wakeful.config.model import VARIANTS
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.variants import Variant, external_names
from wakeful.variants.discovery import external_object, qualified_name
from wakeful.version import __version__

ENTRIES = {
    "wakeful.hf.configuration": "configuration_wakeful",
    "wakeful.hf.modeling": "modeling_wakeful",
}
AUTO_MAP = {
    "AutoConfig": "configuration_wakeful.WakefulConfig",
    "AutoModel": "modeling_wakeful.WakefulModel",
    "AutoModelForCausalLM": "modeling_wakeful.WakefulForCausalLM",
}
_DISCOVERY = "wakeful.variants.discovery"
_DISCOVERED = '''"""The variants that this model is made of."""


def package_classes(folder):
    """Return those of one kind."""
    match folder:
{cases}


def _external_objects():
{foreign}


def external_object(name, *, imports):
    """Return the class that `module:Name` stood for where the model was made."""
    return _external_objects().get(name)


def module_files(names):
    """Return the files of modules: the model's parts are in this folder."""
    return {{}}


def register_external_class(kind):
    """Add nothing: what this model is made of is known."""


def qualified_name(kind):
    """Return `module:Name` of a class that was not part of the package, else ""."""
    return next((name for name, known in _external_objects().items() if known is kind), "")
'''
_FROM = re.compile(r"from\s+[\w.]+\s+import")
_OURS = __name__.partition(".")[0]
_SHAPES = {"Bool", "Float", "Int"}
_JAXTYPING = '''"""Shapes in annotations, which say what they mean and are not checked here."""


class _Shaped:
    def __class_getitem__(cls, item):
        return item[0]


class Bool(_Shaped): ...


class Float(_Shaped): ...


class Int(_Shaped): ...
'''


def write_code(decoder: Decoder, folder: Path) -> list[str]:
    """Write the files that this decoder's model needs; return their names.

    Raises:
        WakefulError: a variant's class is in a module without a file, or the module imports
            something of ours or of its own in a way that cannot be copied.
    """
    files = code_files(decoder)
    for name, source in files.items():
        header = f"# Part of an exported model; copied from wakeful {__version__}.\n"
        (folder / f"{name}.py").write_text(header + source, "utf-8")
    return sorted(f"{name}.py" for name in files)


def code_files(decoder: Decoder) -> dict[str, str]:
    """Return the source of every file that this decoder's model needs, by name without ending."""
    used = _variants(decoder)
    files = {"wakeful__jaxtyping": _JAXTYPING, _flat(_DISCOVERY): _discovery(decoder, used)}
    waiting = [*ENTRIES, *(kind.__module__ for kind in used)]
    while waiting:
        module = waiting.pop()
        if _flat(module) not in files:
            files[_flat(module)], needed = _collect_sources(_module(module))
            waiting += [name for name in needed if name != "jaxtyping"]
    return files


def _module(name: str) -> ModuleType:
    module = importlib.import_module(name)
    if name == "__main__" or getattr(module, "__file__", None) is None:
        raise WakefulError(
            f"a variant's class is defined in {name}, which has no file to go along with the "
            "export: define it in a module of its own, and import it from there"
        )
    return module


def _collect_sources(module: ModuleType) -> tuple[str, list[str]]:
    """Return a module's source, what goes along imported from beside it, and those modules."""
    source = inspect.getsource(module)
    lines = source.splitlines(keepends=True)
    needed: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        name = _local_import(module, node)
        if name is None:
            continue
        number, last = node.lineno - 1, node.end_lineno or node.lineno
        found = _FROM.search(lines[number])
        if isinstance(node, ast.Import) or not found or _names_a_module(name, node):
            raise WakefulError(
                f"line {node.lineno} of {module.__file__}, {ast.unparse(node)!r}, cannot go along "
                "with an export: import names from the file that defines them, on one line"
            )
        modules = _defining_modules(name, node)
        if list(modules) == [name]:
            lines[number] = _FROM.sub(f"from .{_flat(name)} import", lines[number], count=1)
        else:
            start = lines[number][: found.start()]
            imports = [f"{start}from .{_flat(own)} import {', '.join(modules[own])}\n"
                       for own in modules]  # fmt: skip
            lines[number:last] = ["".join(imports), *[""] * (last - number - 1)]
        needed += modules
    return "".join(lines), needed


def _local_import(module: ModuleType, node: ast.Import | ast.ImportFrom) -> str | None:
    """Return the module that an import reads, if that one has to go along, else None."""
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
        return next((name for name in names if _goes_along(module, name)), None)
    name = "." * node.level + (node.module or "")
    if node.level:
        name = importlib.util.resolve_name(name, module.__package__)
    if name == "jaxtyping":
        return name if {alias.name for alias in node.names} <= _SHAPES else None
    return name if _goes_along(module, name) else None


def _goes_along(module: ModuleType, name: str) -> bool:
    """Return True where a module is ours, or the user's like the one that imports it."""
    top, own = name.partition(".")[0], module.__name__.partition(".")[0]
    if top == _OURS or (top == own and module.__package__):
        return True
    if own == _OURS or module.__file__ is None:
        return False
    spec = importlib.util.find_spec(top)
    folder = Path(module.__file__).parent
    return spec is not None and spec.origin is not None and folder in Path(spec.origin).parents


def _names_a_module(package: str, node: ast.ImportFrom) -> bool:
    """Return True where an import takes a module out of a package, not a name out of a module."""
    module = importlib.import_module(package)
    return package == _OURS or any(
        isinstance(getattr(module, alias.name, None), ModuleType) for alias in node.names
    )


def _defining_modules(name: str, node: ast.ImportFrom) -> dict[str, list[str]]:
    """Return the modules that define what is imported, each with its names as they are written.

    Names that a package's `__init__` imports come from the files that it imports them from: the
    package itself would bring all of its files, and a file of its own could not be read before it.
    """
    module = importlib.import_module(name)
    passed_on = inspect.getsource(module) if hasattr(module, "__path__") else ""
    origin: dict[str, str] = {}
    for each in ast.walk(ast.parse(passed_on)):
        if isinstance(each, ast.ImportFrom) and (source := _local_import(module, each)):
            origin |= {alias.name: source for alias in each.names if alias.asname is None}
    modules: dict[str, list[str]] = {}
    for alias in node.names:
        modules.setdefault(origin.get(alias.name, name), []).append(ast.unparse(alias))
    return modules


def _flat(module: str) -> str:
    if module == "jaxtyping":
        return "wakeful__jaxtyping"
    return ENTRIES.get(module, module.replace(".", "__"))


def _variants(decoder: Decoder) -> list[type[Variant]]:
    """Return the classes of every variant that the decoder is made of, and our bases of them."""
    parts: list[object] = [*decoder.modules(), decoder.placement]
    if decoder.config.positions == "rotary":
        parts.append(decoder.rotary.scaling)
    kinds = {type(part) for part in parts if isinstance(part, Variant)}
    bases = {
        base
        for kind in kinds
        for base in kind.__mro__
        if issubclass(base, Variant) and base is not Variant and not qualified_name(base)
    }
    return sorted(kinds | bases, key=lambda kind: (kind.__module__, kind.__name__))


def _discovery(decoder: Decoder, used: Sequence[type[Variant]]) -> str:
    """Return the source of a module `discovery` that lists the variants a decoder uses."""
    cases: list[str] = []
    for folder in VARIANTS.values():
        kinds = [kind for kind in used if f"{kind.__module__}.".startswith(f"wakeful.{folder}.")]
        names = ", ".join(kind.__name__ for kind in kinds)
        cases += [
            f'        case "{folder}":',
            *_imports(kinds, 12),
            f"            return [{names}]",
        ]
    own = [kind for kind in used if qualified_name(kind)]
    table = {qualified_name(kind): kind.__name__ for kind in own}
    for field in VARIANTS:
        for name in external_names(getattr(decoder.config, field)):
            kind = external_object(name, imports=False)
            table |= {name: kind.__name__} if isinstance(kind, type) else {}
    entries = ", ".join(f'"{name}": {kind}' for name, kind in table.items())
    lines = [*_imports(own, 4), f"    return {{{entries}}}"]
    return _DISCOVERED.format(cases="\n".join(cases), foreign="\n".join(lines))


def _imports(kinds: Iterable[type[Variant]], indent: int) -> list[str]:
    return [
        f"{' ' * indent}from .{_flat(kind.__module__)} import {kind.__name__}" for kind in kinds
    ]
