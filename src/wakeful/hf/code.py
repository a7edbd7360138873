"""The code that an exported model carries: copies of the files it needs, flat beside its weights.

Transformers loads them with `trust_remote_code=True` where `wakeful` is not installed. It copies a
model's files by the relative imports it finds in them and knows no folders, so
`wakeful.model.decoder` becomes `wakeful__model__decoder.py`. Only the variants that the model uses
go along.
"""

import importlib
import inspect
import re
from collections.abc import Iterable
from pathlib import Path

import wakeful
from wakeful.model.decoder import Decoder
from wakeful.variants import Variant

ENTRIES = {
    "wakeful.hf.configuration": "configuration_wakeful",
    "wakeful.hf.modeling": "modeling_wakeful",
}
AUTO_MAP = {
    "AutoConfig": "configuration_wakeful.WakefulConfig",
    "AutoModel": "modeling_wakeful.WakefulModel",
    "AutoModelForCausalLM": "modeling_wakeful.WakefulForCausalLM",
}
FOLDERS = ("routes", "depth", "normalizers", "norms", "placements", "ropes")
_DISCOVERY = "wakeful.discovery"
_IMPORT = re.compile(r"^( *)from (wakeful[\w.]*|jaxtyping) import", re.MULTILINE)
_JAXTYPING = '''"""Shapes in annotations, which say what they mean and are not checked here."""


class _Shaped:
    def __class_getitem__(cls, item):
        return item[0]


class Bool(_Shaped): ...


class Float(_Shaped): ...


class Int(_Shaped): ...
'''


def write_code(decoder: Decoder, folder: Path) -> list[str]:
    """Write the files that this decoder's model needs; return their names."""
    used = _variants(decoder)
    files = {"wakeful__jaxtyping": _JAXTYPING, _flat(_DISCOVERY): _discovery(used)}
    waiting = [*ENTRIES, *(kind.__module__ for kind in used)]
    while waiting:
        module = waiting.pop()
        if _flat(module) in files:
            continue
        source = inspect.getsource(importlib.import_module(module))
        files[_flat(module)] = _IMPORT.sub(
            lambda found: f"{found[1]}from .{_flat(found[2])} import", source
        )
        waiting += [found[2] for found in _IMPORT.finditer(source) if found[2] != "jaxtyping"]
    for name, source in files.items():
        header = f"# Part of an exported model; copied from wakeful {wakeful.__version__}.\n"
        (folder / f"{name}.py").write_text(header + source, "utf-8")
    return sorted(f"{name}.py" for name in files)


def _flat(module: str) -> str:
    if module == "jaxtyping":
        return "wakeful__jaxtyping"
    return ENTRIES.get(module, module.replace(".", "__"))


def _variants(decoder: Decoder) -> list[type[Variant]]:
    """Return the classes of every variant that the decoder is made of."""
    parts: list[object] = [*decoder.modules(), decoder.placement]
    if decoder.config.positions == "rotary":
        parts.append(decoder.rotary.scaling)
    found = {type(part) for part in parts if isinstance(part, Variant)}
    return sorted(found, key=lambda kind: (kind.__module__, kind.__name__))


def _discovery(used: Iterable[type[Variant]]) -> str:
    lines = [
        '"""The variants that this model is made of."""',
        "",
        "",
        "def classes(folder):",
        '    """Return those of one kind."""',
        "    match folder:",
    ]
    for folder in FOLDERS:
        kinds = [kind for kind in used if kind.__module__.startswith(f"wakeful.{folder}.")]
        lines.append(f'        case "{folder}":')
        lines += [
            f"            from .{_flat(kind.__module__)} import {kind.__name__}" for kind in kinds
        ]
        lines.append(f"            return [{', '.join(kind.__name__ for kind in kinds)}]")
    return "\n".join(lines) + "\n"
