"""An optimizer's state in files: tensors by name beside what JSON holds, and what must be there."""

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
_OURS = ("torch", "wakeful")
"""Packages whose classes are listed; one of another package may have the name of one of these."""
BUILT = "built"
"""The entry of a group of parameters that says what it was made with."""
CHANGING = frozenset({"params", "lr", "initial_lr", "rotations", "step", BUILT})
"""Entries of a group that are state, or that the optimizer itself compares."""
_PLAIN = (type(None), bool, int, float, str)


def missing(kind: type, state: Mapping[str, object]) -> list[str] | None:
    """Return what a parameter's state lacks for an optimizer of the class `kind`, sorted.

    None for a class that is not listed, which alone knows its state.
    """
    if kind.__name__ not in _NEEDED or not keeps_options(kind):
        return None
    needed = _NEEDED[kind.__name__]
    if kind.__name__ == "MuonAdamW" and "momentum_buffer" not in state:
        needed = _ADAM
    return sorted(needed - state.keys())


def keeps_options(kind: type) -> bool:
    """Whether a class is torch's or ours, whose steps change no option of a group."""
    return kind.__module__.split(".")[0] in _OURS


def apart(value: Any, name: str, tensors: dict[str, Tensor], *, option: bool = False) -> Any:
    """Return a value, of lists and dictionaries to any depth, as JSON holds it.

    Its tensors go into `tensors` by names that begin with `name`, and the order that their
    dimensions have in memory, on which the last bit of a product depends, is kept. Tuples become
    lists. Of an `option` what no file holds is described.

    Raises:
        WakefulError: it holds something else than tensors, numbers and strings.
    """
    if isinstance(value, Tensor):
        if name in tensors:
            raise WakefulError(f"two tensors of its state are called {name}")
        tensors[name] = value.detach()
        return {"tensor": name, "order": _order(value)}
    if isinstance(value, list | tuple):
        return [apart(e, f"{name}.{n}", tensors, option=option) for n, e in enumerate(value)]
    if isinstance(value, dict) and all(type(key) in _PLAIN for key in value):
        items = {k: apart(e, f"{name}.{k}", tensors, option=option) for k, e in value.items()}
        return items if all(type(key) is str for key in value) else {"items": [*items.items()]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
        return value
    if option:
        said = f" {value}" if isinstance(value, torch.dtype | enum.Enum) else ""
        return {"fixed": type(value).__name__ + said}
    raise WakefulError(
        f"{name} of its state is of the type {type(value).__name__}, and a checkpoint holds "
        "tensors, numbers, strings, lists and dictionaries"
    )


def together(value: Any, read: Callable[[str], Tensor]) -> Any:
    """Return what `apart` took apart; `read` gives a tensor by its name."""
    match value:
        case {"tensor": name, "order": order}:
            found = read(name)
            if order and not isinstance(found, DTensor):  # as it lay in memory
                found = torch.empty_permuted(found.shape, order, dtype=found.dtype).copy_(found)
        case {"float": text, **rest} if not rest:
            found = float(text)
        case {"items": items, **rest} if not rest:
            found = {key: together(each, read) for key, each in items}
        case dict():
            found = {key: together(each, read) for key, each in value.items()}
        case list():
            found = [together(each, read) for each in value]
        case _:
            found = value
    return found


def _order(tensor: Tensor) -> list[int]:
    """Return the dimensions in their order in memory where it differs from their own, else []."""
    if isinstance(tensor, DTensor) or tensor.is_contiguous():
        return []
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return order if tensor.permute(order).is_contiguous() else []


def options_of_group(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options as JSON holds them, to tell later whether they are the same."""
    return {
        key: apart(value, key, {}, option=True)
        for key, value in group.items()
        if key not in CHANGING
    }


def exactly(loaded: Any, stored: Any) -> Any:
    """Return what torch loaded in the form it was stored in.

    torch gives every tensor its parameter's dtype, and takes strings apart.
    """
    if isinstance(loaded, Tensor) and isinstance(stored, Tensor):
        return loaded if loaded.dtype == stored.dtype else stored.to(loaded.device)
    if type(loaded) is not type(stored) or isinstance(loaded, Tensor):
        return loaded
    if isinstance(stored, list) and len(loaded) == len(stored):
        return [exactly(*each) for each in zip(loaded, stored, strict=True)]
    if isinstance(stored, dict) and loaded.keys() == stored.keys():
        return {key: exactly(loaded[key], stored[key]) for key in stored}
    return stored
