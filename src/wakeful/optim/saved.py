"""An optimizer's state in files: tensors by name, other values as JSON."""

import contextlib
import enum
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from wakeful.errors import WakefulError

_PLAIN = (type(None), bool, int, float, str)


def state_to_json(state_dict: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Return an optimizer's `state_dict()` in a form that JSON can hold, its tensors put into
    `tensors`, by names such as "state.3.exp_avg".

    An option of a group that no file can hold, such as a dtype, is left out: the constructor gives
    it again.

    Raises:
        WakefulError: the state holds something else than tensors, numbers and strings.
    """
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(state_dict["param_groups"]):
        groups.append({})
        for key, value in group.items():
            with contextlib.suppress(WakefulError):
                groups[-1][key] = to_json(value, f"groups.{number}.{key}", tensors)
    packed = {
        key: to_json(value, key, tensors)
        for key, value in state_dict.items()
        if key != "param_groups"
    }
    return {**packed, "param_groups": groups}


def to_json(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value, of lists and dictionaries to any depth, in a form that JSON can hold.

    Tensors in it are put into `tensors`, by names that begin with `name`; the order that their
    dimensions have in memory, on which the last bit of a product depends, is kept. Tuples become
    lists.

    Raises:
        WakefulError: it holds something else than tensors, numbers and strings.
    """
    if isinstance(value, Tensor):
        if name in tensors:
            raise WakefulError(f"two tensors of its state are called {name}")
        tensors[name] = value.detach()
        return {"tensor": name, "order": _memory_order(value)}
    if isinstance(value, list | tuple):
        return [to_json(e, f"{name}.{n}", tensors) for n, e in enumerate(value)]
    if isinstance(value, dict) and all(type(key) in _PLAIN for key in value):
        items = {k: to_json(e, f"{name}.{k}", tensors) for k, e in value.items()}
        # The keys of a JSON object are strings: others are kept in a list of pairs.
        return items if all(type(key) is str for key in value) else {"items": [*items.items()]}
    if isinstance(value, float) and not math.isfinite(value):  # JSON has no such numbers
        return {"float": str(value)}
    if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):
        return value
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
