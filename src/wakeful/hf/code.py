"""The code of an exported model: copies of the source files that it needs, beside its weights.

Transformers loads them with `trust_remote_code=True` where `wakeful` is not installed. It copies a
model's files by the relative imports it finds in them and knows no folders, so
`wakeful.model.decoder` becomes `wakeful__model__decoder.py`. Of the variants only those that the
model uses are copied; a user's own variant is copied with the user's modules that it imports.
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
    """Return the variants of one folder of wakeful, such as "routes"."""
    match folder:
{cases}


def _external_objects():
{foreign}


def external_object(name, *, imports):
    """Return the class that was `module:Name` where the model was made; None for another name."""
    return _external_objects().get(name)


def register_external_class(kind):
    """Do nothing: the classes of this model are listed in this file."""


def qualified_name(kind):
    """Return `module:Name` of a class that was not part of the package, else ""."""
    return next((name for name, known in _external_objects().items() if known is kind), "")
'''
_FROM_IMPORT = re.compile(r"from\s+[\w.]+\s+import")
_WAKEFUL = __name__.partition(".")[0]
_SHAPE_TYPES = {"Bool", "Float", "Int"}
_JAXTYPING = '''"""Shapes in annotations, which say what they mean and are not checked here."""


class _Shaped:
    def __class_getitem__(cls, item):
        return item[0]


class Bool(_Shaped): ...


class Float(_Shaped): ...


class Int(_Shaped): ...
'''


def write_code(decoder: Decoder, folder: Path) -> list[str]:
    """Write the source files that an exported decoder needs to a folder; return their names.

    Raises:
        WakefulError: a variant's class is in a module without a file, or one of the modules to copy
            has an import that cannot be rewritten.
    """
    files = code_files(decoder)
    for name, source in files.items():
        header = f"# Part of an exported model; copied from wakeful {__version__}.\n"
        (folder / f"{name}.py").write_text(header + source, "utf-8")
    return sorted(f"{name}.py" for name in files)


def code_files(decoder: Decoder) -> dict[str, str]:
    """Return the source of every file that an exported decoder needs, by file name without ".py".

    These are copies of the modules of the configuration, of the model and of the decoder's
    variants, and of all modules of wakeful or of the user that they import. Two are replaced by
    shorter sources: the discovery of variants, and the package jaxtyping.
    """
    used = _list_variants(decoder)
    files = {
        "wakeful__jaxtyping": _JAXTYPING, _flat_name(_DISCOVERY): _discovery_source(decoder, used),
    }  # fmt: skip
    modules_to_copy = [*ENTRIES, *(variant.__module__ for variant in used)]
    while modules_to_copy:
        module = modules_to_copy.pop()
        if _flat_name(module) not in files:
            files[_flat_name(module)], imported = _rewrite_imports(_import_copyable(module))
            modules_to_copy += [name for name in imported if name != "jaxtyping"]
    return files


def _import_copyable(name: str) -> ModuleType:
    """Import a module whose file is to be copied.

    Raises:
        WakefulError: it is `__main__`, or has no file.
    """
    module = importlib.import_module(name)
    if name == "__main__" or getattr(module, "__file__", None) is None:
        raise WakefulError(
            f"a variant's class is defined in {name}, which has no file to copy to the export: "
            "define it in a module of its own, and import it from there"
        )
    return module


def _rewrite_imports(module: ModuleType) -> tuple[str, list[str]]:
    """Return the source of a module for an export, and the names of the modules that it imports and
    that are copied as well.

    Imports of these become relative, such as `from .wakeful__model__decoder import …`.

    Raises:
        WakefulError: an import of such a module cannot be rewritten.
    """
    source = inspect.getsource(module)
    lines = source.splitlines(keepends=True)
    imported: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Import | ast.ImportFrom):
            continue
        name = _copied_module(module, node)
        if name is None:  # a module of another package
            continue
        first, end = node.lineno - 1, node.end_lineno or node.lineno
        match = _FROM_IMPORT.search(lines[first])  # "from … import"
        if isinstance(node, ast.Import) or not match or _imports_submodule(name, node):
            raise WakefulError(
                f"line {node.lineno} of {module.__file__}, {ast.unparse(node)!r}, cannot be copied "
                "to an export: import names from the file that defines them, on one line"
            )
        names_by_module = _defining_modules(name, node)
        if list(names_by_module) == [name]:  # this module defines all names: rename it in place
            lines[first] = _FROM_IMPORT.sub(
                f"from .{_flat_name(name)} import", lines[first], count=1
            )
        else:  # the module imports names from other modules: import them from those
            indent = lines[first][: match.start()]
            imports = [
                f"{indent}from .{_flat_name(origin)} import {', '.join(names)}\n"
                for origin, names in names_by_module.items()
            ]
            # As many entries as before, so that `lineno` still finds the later lines.
            lines[first:end] = ["".join(imports), *[""] * (end - first - 1)]
        imported += names_by_module
    return "".join(lines), imported


def _copied_module(module: ModuleType, node: ast.Import | ast.ImportFrom) -> str | None:
    """Return the full name of the module from which an import statement in `module` imports, if
    that module is copied to an export; else None. Of `import a, b` it is the first copied one.
    """
    if isinstance(node, ast.Import):
        names = [alias.name for alias in node.names]
        return next((name for name in names if _is_copied(module, name)), None)
    name = "." * node.level + (node.module or "")
    if node.level:  # a relative import
        name = importlib.util.resolve_name(name, module.__package__)
    if name == "jaxtyping":  # replaced by a stand-in (`_JAXTYPING`) that has only `_SHAPE_TYPES`
        return name if {alias.name for alias in node.names} <= _SHAPE_TYPES else None
    return name if _is_copied(module, name) else None


def _is_copied(importer: ModuleType, name: str) -> bool:
    """Tell whether the module `name`, which `importer` imports, is copied to an export.

    Modules of wakeful are copied. A user's module is copied if `importer` is a user's module of the
    same package, or of a folder that contains the imported module.
    """
    package, importer_package = name.partition(".")[0], importer.__name__.partition(".")[0]
    in_same_package = package == importer_package and importer.__package__  # "" outside of any
    if package == _WAKEFUL or in_same_package:
        return True
    # wakeful itself imports no user's module.
    if importer_package == _WAKEFUL or importer.__file__ is None:
        return False
    spec = importlib.util.find_spec(package)
    folder = Path(importer.__file__).parent
    return spec is not None and spec.origin is not None and folder in Path(spec.origin).parents


def _imports_submodule(package: str, node: ast.ImportFrom) -> bool:
    """Tell whether the statement `from package import …` imports a module, not a class or function.

    True as well for `from wakeful import …`: a module that loads names lazily does not show where
    they are defined.
    """
    if package == _WAKEFUL:
        return True
    module = importlib.import_module(package)
    return any(isinstance(getattr(module, alias.name, None), ModuleType) for alias in node.names)


def _defining_modules(name: str, node: ast.ImportFrom) -> dict[str, list[str]]:
    """Group the names that `node` imports from the module `name` ("Norm", "Norm as Base") by the
    module that defines them.

    If `name` is a package, its `__init__` may import them from the package's files. They are then
    grouped under these files, since an import of the package would need all of its files, in an
    order that may not work.
    """
    module = importlib.import_module(name)
    package_source = inspect.getsource(module) if hasattr(module, "__path__") else ""
    origins: dict[str, str] = {}  # the file of each name that the package's `__init__` imports
    for statement in ast.walk(ast.parse(package_source)):
        if not isinstance(statement, ast.ImportFrom):
            continue
        origin = _copied_module(module, statement)
        if origin:
            origins |= {alias.name: origin for alias in statement.names if alias.asname is None}
    names_by_module: dict[str, list[str]] = {}
    for alias in node.names:
        origin = origins.get(alias.name, name)
        names_by_module.setdefault(origin, []).append(ast.unparse(alias))
    return names_by_module


def _flat_name(module: str) -> str:
    """Return the file name, without ".py", of a module's copy in an exported folder."""
    if module == "jaxtyping":
        return "wakeful__jaxtyping"
    return ENTRIES.get(module, module.replace(".", "__"))


def _list_variants(decoder: Decoder) -> list[type[Variant]]:
    """Return the classes of all variants in a decoder (routes, norms …), and their base classes
    that belong to wakeful, sorted by name. A user's base classes are not listed: they are copied
    with the user's modules.
    """
    parts: list[object] = [*decoder.modules(), decoder.placement]  # a placement is no module
    if decoder.config.positions == "rotary":
        parts.append(decoder.rotary.scaling)  # nor is a scaling of RoPE
    classes = {type(part) for part in parts if isinstance(part, Variant)}
    bases = {
        base
        for variant in classes
        for base in variant.__mro__
        # Only a user's class has a qualified name.
        if issubclass(base, Variant) and base is not Variant and not qualified_name(base)
    }
    return sorted(classes | bases, key=lambda variant: (variant.__module__, variant.__name__))


def _discovery_source(decoder: Decoder, used: Sequence[type[Variant]]) -> str:
    """Return the source that replaces `wakeful.variants.discovery` in an exported folder.

    It lists the classes of variants that the decoder uses (`used`): those of wakeful by their
    folder, and a user's by `module:Name`.
    """
    cases: list[str] = []
    for folder in VARIANTS.values():
        prefix = f"wakeful.{folder}."
        classes = [variant for variant in used if f"{variant.__module__}.".startswith(prefix)]
        names = ", ".join(variant.__name__ for variant in classes)
        cases += [
            f'        case "{folder}":',
            *_import_lines(classes, 12),
            f"            return [{names}]",
        ]
    external = [variant for variant in used if qualified_name(variant)]  # a user's classes
    class_names = {qualified_name(variant): variant.__name__ for variant in external}
    # The configuration may name a class by a module that only imports it.
    for field in VARIANTS:
        for name in external_names(getattr(decoder.config, field)):
            variant = external_object(name, imports=False)
            if isinstance(variant, type):
                class_names[name] = variant.__name__
    entries = ", ".join(f'"{name}": {class_name}' for name, class_name in class_names.items())
    lines = [*_import_lines(external, 4), f"    return {{{entries}}}"]
    return _DISCOVERED.format(cases="\n".join(cases), foreign="\n".join(lines))


def _import_lines(classes: Iterable[type[Variant]], indent: int) -> list[str]:
    """Return lines of source, indented, that import classes from their copied modules."""
    return [
        f"{' ' * indent}from .{_flat_name(variant.__module__)} import {variant.__name__}"
        for variant in classes
    ]
