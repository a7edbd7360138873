"""An optimizer's state in files: tensors by name, other values as JSON; checks of its entries."""

import enum
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from wakeful.errors import WakefulError

_ADAM = {"step", "exp_avg", "exp_avg_sq"}
_NEEDED: Mapping[str, set[str]] = {
    "AdamW": _ADAM, "OrthoAdam": _ADAM, "MuonAdamW": set(),
}  # fmt: skip
"""The names that a parameter's state must have, for each optimizer class."""
_OURS = ("torch", "wakeful")
"""The packages of these classes; one of another package may have the same name."""
BUILT = "built"
"""The entry of a group of parameters that says what it was made with."""
CHANGING = frozenset({"params", "lr", "initial_lr", "rotations", "step", BUILT})
"""Entries of a group that are state, or that the optimizer itself compares."""
_PLAIN = (type(None), bool, int, float, str)


def missing_state(kind: type, state: Mapping[str, object]) -> list[str] | None:
    """Return the names that a parameter's state lacks for the optimizer class `kind`, sorted.

    None for a class whose state is not known here.
    """
    if kind.__name__ not in _NEEDED or not keeps_options(kind):
        return None
    needed = _NEEDED[kind.__name__]
    # Muon's parameters have a momentum buffer; the others are AdamW's.
    if kind.__name__ == "MuonAdamW" and "momentum_buffer" not in state:
        needed = _ADAM
    return sorted(needed - state.keys())


def keeps_options(kind: type) -> bool:
    """Return True for classes of torch and wakeful, whose steps do not change a group's options."""
    return kind.__module__.split(".")[0] in _OURS


def to_json(value: Any, name: str, tensors: dict[str, Tensor], *, option: bool = False) -> Any:
    """Return a value, of lists and dictionaries to any depth, in a form that JSON can hold.

    Tensors in it are put into `tensors`, by names that begin with `name`; the order that their
    dimensions have in memory, on which the last bit of a product depends, is kept. Tuples become
    lists. With `option`, a value of any other type is replaced by a description of it.

    Raises:
        WakefulError: without `option`, it holds something else than tensors, numbers and strings.
    """
    if isinstance(value, Tensor):
        if name in tensors:
            raise WakefulError(f"two tensors of its state are called {name}")
        tensors[name] = value.detach()
        return {"tensor": name, "order": _memory_order(value)}
    if isinstance(value, list | tuple):
        return [to_json(e, f"{name}.{n}", tensors, option=option) for n, e in enumerate(value)]
    if isinstance(value, dict) and all(type(key) in _PLAIN for key in value):
        items = {k: to_json(e, f"{name}.{k}", tensors, option=option) for k, e in value.items()}
        # The keys of a JSON object are strings: others are kept in a list of pairs.
        return items if all(type(key) is str for key in value) else {"items": [*items.items()]}
    if isinstance(value, float) and not math.isfinite(value):  # JSON has no such numbers
        return {"float": str(value)}
    if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
        return value
    if option:
        detail = f" {value}" if isinstance(value, torch.dtype | enum.Enum) else ""
        return {"fixed": type(value).__name__ + detail}
    raise WakefulError(
        f"{name} of its state is of the type {type(value).__name__}, and a checkpoint holds "
        "tensors, numbers, strings, lists and dictionaries"
    )


def from_json(value: Any, read: Callable[[str], Tensor]) -> Any:
    """Return the value that `to_json` converted; `read` returns a tensor by its name."""
    match value:
        case {"tensor": name, "order": order}:
            tensor = read(name)
            if order and not isinstance(tensor, DTensor):  # laid out in memory as it was
                empty = torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype)
                tensor = empty.copy_(tensor)
            return tensor
        case {"float": text, **rest} if not rest:
            return float(text)
        case {"items": items, **rest} if not rest:
            return {key: from_json(item, read) for key, item in items}
        case dict():
            return {key: from_json(item, read) for key, item in value.items()}
        case list():
            return [from_json(item, read) for item in value]
        case _:
            return value


def _memory_order(tensor: Tensor) -> list[int]:
    """Return the dimensions of a dense tensor from the outermost in memory to the innermost; [] if
    that is their own order, or the tensor is sharded or has gaps.
    """
    if isinstance(tensor, DTensor) or tensor.is_contiguous():
        return []
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return order if tensor.permute(order).is_contiguous() else []


def options_of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options as JSON, to compare them with a later run's."""
    return {
        key: to_json(value, key, {}, option=True)
        for key, value in group.items()
        if key not in CHANGING
    }


def restore_type(loaded: Any, stored: Any) -> Any:
    """Return `loaded`, a value of an optimizer's state after `load_state_dict`, in the form that it
    had when `stored`.

    torch casts every tensor to its parameter's dtype, and splits strings into characters.
    """
    if isinstance(loaded, Tensor) and isinstance(stored, Tensor):
        return loaded if loaded.dtype == stored.dtype else stored.to(loaded.device)
    if type(loaded) is not type(stored) or isinstance(loaded, Tensor):
        return loaded  # the optimizer itself gave it another form
    if isinstance(stored, list) and len(loaded) == len(stored):
        return [restore_type(*pair) for pair in zip(loaded, stored, strict=True)]
    if isinstance(stored, dict) and loaded.keys() == stored.keys():
        return {key: restore_type(loaded[key], stored[key]) for key in stored}
    return stored
