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
    """Return an optimizer's `state_dict()` in a form that JSON can hold; put its tensors into the
    dictionary `tensors`, by names such as "state.3.exp_avg".

    An option of a group that no file can hold, such as a dtype, is left out: the constructor gives
    it again.

    Raises:
        WakefulError: the state holds something else than tensors, numbers and strings.
    """
    groups: list[dict[str, Any]] = []
    for number, group in enumerate(state_dict["param_groups"]):
        options: dict[str, Any] = {}
        for key, value in group.items():
            with contextlib.suppress(WakefulError):  # an option that no file can hold
                options[key] = to_json(value, f"groups.{number}.{key}", tensors)
        groups.append(options)
    rest = {
        key: to_json(value, key, tensors)
        for key, value in state_dict.items()
        if key != "param_groups"
    }
    return {**rest, "param_groups": groups}


def to_json(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Return a value, which may be nested lists and dictionaries, in a form that JSON can hold.

    Tensors in it are put into the dictionary `tensors`, by names that begin with `name`. The form
    records the order of their dimensions in memory, on which the last bit of a product depends.
    Tuples become lists.

    Raises:
        WakefulError: the value holds something else than tensors, numbers and strings, or two
            tensors would have one name.
    """
    if isinstance(value, Tensor):
        if name in tensors:
            raise WakefulError(f"two tensors of its state are called {name}")
        tensors[name] = value.detach()
        return {"tensor": name, "order": _memory_order(value)}
    if isinstance(value, list | tuple):
        return [to_json(item, f"{name}.{number}", tensors) for number, item in enumerate(value)]
    if isinstance(value, dict) and all(type(key) in _PLAIN for key in value):
        items = {key: to_json(item, f"{name}.{key}", tensors) for key, item in value.items()}
        # The keys of a JSON object are strings: others are kept in a list of pairs.
        return items if all(type(key) is str for key in value) else {"items": [*items.items()]}
    if isinstance(value, float) and not math.isfinite(value):  # JSON has no such numbers
        return {"float": str(value)}
    if isinstance(value, _PLAIN) and not isinstance(value, enum.Enum):  # a number may be one
        return value
    raise WakefulError(
        f"{name} of its state is of the type {type(value).__name__}, and a checkpoint holds "
        "tensors, numbers, strings, lists and dictionaries"
    )


def from_json(value: Any, read: Callable[[str], Tensor]) -> Any:
    """Return the value from the form that `to_json` gave it; `read` returns a tensor by its name.

    A tensor that is not sharded gets back the order that its dimensions had in memory.
    """
    match value:
        case {"tensor": name, "order": order}:
            tensor = read(name)
            if order and not isinstance(tensor, DTensor):
                empty = torch.empty_permuted(tensor.shape, order, dtype=tensor.dtype)
                tensor = empty.copy_(tensor)
            return tensor
        case {"float": text, **rest} if not rest:  # with no other key
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
    """Return a tensor's dimensions in their order in memory, the outermost first.

    [] if that is their usual order, or if they have none because the tensor is sharded or its
    memory has gaps.
    """
    if isinstance(tensor, DTensor) or tensor.is_contiguous():
        return []
    order = sorted(range(tensor.dim()), key=lambda dim: -tensor.stride(dim))
    return order if tensor.permute(order).is_contiguous() else []
