"""Choice of the axes of parameters that an optimizer rotates.

In this order: the caller's choice (`axes=`); the role that the parameter's module declares
(`wakeful.variants.roles`); the family of its name (`wakeful.variants.families`); the input axis of
a matrix, axis 1 of a Linear's (out, in), which is a guess (`ASSUMED`). Scalars, vectors and tensors
of more than two axes keep the identity, and so do axes that count tokens or positions.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.variants.families import roles_by_name
from wakeful.variants.roles import role_of

AxisChoice = int | tuple[int, ...] | None
"""An axis, several, () for none, or None for the default."""
Axes = Mapping[str, AxisChoice] | Mapping[Tensor, AxisChoice] | Callable[[str, Tensor], AxisChoice]
"""Choices by name or by tensor, or a function of both."""
ASSUMED = "input axis"
"""The reason of an axis that is rotated without being known to lie in the residual stream."""
_LISTED = 8
"""Most names in a warning."""
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
"""Parts of parameters' names that wrapping modules insert."""


@dataclass(frozen=True)
class Line:
    """One parameter of a plan; `axes` are the rotated ones, the residual stream's first."""

    name: str
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    rotation: str
    why: str


class RotationPlan(tuple[Line, ...]):
    """Rotated axes of all parameters; printed, similar layers share one line."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return the plan as a table of text; parameters whose lines differ only in the layer's
        number share a row, with their count.
        """
        counts = Counter(  # how many parameters share a row
            (
                _without_layer_numbers(line.name),
                "×".join(map(str, line.shape)) or "-",
                " and ".join(map(str, line.axes)) or "-",
                line.rotation,
                line.why,
            )
            for line in self
        )
        rows = [("name", "number", "shape", "axis", "rotation", "why")]
        rows += [(name, str(count), *rest) for (name, *rest), count in counts.items()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines: list[str] = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append("  ".join(cells).rstrip())
        return "\n".join(lines)

    __repr__ = __str__


def _without_layer_numbers(name: str) -> str:
    """Return a name with `*` for each number between dots: `blocks.*.mlp.weight`."""
    return re.sub(r"\.\d+(?=\.)", ".*", name)


def list_names(names: Iterable[str]) -> str:
    """Return parameter names as text for a message: at most `_LISTED`, and the number of others.

    Names that differ only in the layer's number are listed once, with their count.
    """
    counts = Counter(map(_without_layer_numbers, names))
    listed = [f"{name} ({count})" if count > 1 else name for name, count in counts.items()]
    text = ", ".join(listed[:_LISTED])
    unlisted = len(listed) - _LISTED
    return f"{text} and {unlisted} more" if unlisted > 0 else text


def plain_name(name: str) -> str:
    """Return a parameter's name without the parts that wrapping modules insert (for data
    parallelism, compilation or checkpointing): a wrapped model has the same rotations.
    """
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def decide_axes(
    parameters: Mapping[str, Tensor],
    axes: Axes | None = None,
    *,
    both_sides: bool = False,
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Decide which axes of each parameter are rotated; return (axes, reason) by the parameter's
    name.

    The axis in the residual stream comes first. It is the user's choice in `axes`, or else follows
    from the role that a module declares for its parameter, or else from the parameter's name, if
    this fits a family of models. With `both_sides`, matrices are rotated on both axes, but not on
    one that counts tokens or positions.

    Raises:
        WakefulError: `axes` names an unknown parameter, or an axis that a matrix does not have.
    """
    user_choice = _axis_chooser(parameters, axes)
    # (family, role) of matrices whose names fit a family of models, such as Llama's.
    families = roles_by_name({plain_name(name): tuple(p.shape) for name, p in parameters.items()})
    decisions: dict[str, tuple[tuple[int, ...], str]] = {}
    for name, parameter in parameters.items():
        choice = user_choice(name, parameter)
        if parameter.numel() == 0:
            decisions[name] = (), "empty"
            continue
        if choice is not None:
            decisions[name] = _check_axes(name, parameter, choice), "given"
            continue
        if parameter.ndim != 2:
            decisions[name] = (), "scalar or vector" if parameter.ndim < 2 else "more than two axes"
            continue
        role, why = role_of(parameter), "role"
        if role is None and plain_name(name) in families:
            family, role = families[plain_name(name)]
            why = f"family {family}"
        if role is None:  # nothing is known: guess the input axis of a linear layer
            decisions[name] = (1,), ASSUMED
        elif role.residual is None:  # no axis lies in the residual stream
            decisions[name] = (), why
        else:
            other_axis = (1 - role.residual,) if both_sides and not role.vocabulary else ()
            decisions[name] = (role.residual, *other_axis), why
    return decisions


def _axis_chooser(
    parameters: Mapping[str, Tensor], axes: Axes | None
) -> Callable[[str, Tensor], AxisChoice]:
    """Return a function of (name, parameter) that gives the user's choice of the parameter's axes,
    or None where there is none.

    Raises:
        WakefulError: `axes` is a mapping with a parameter that the optimizer does not have.
    """
    if axes is None:
        return lambda name, parameter: None
    if not isinstance(axes, Mapping):
        return axes
    # A tensor as a key is found by its id: tensors are compared elementwise.
    choices: dict[str | int, AxisChoice] = {}
    own_keys = parameters.keys() | {id(parameter) for parameter in parameters.values()}
    for parameter, choice in axes.items():
        if isinstance(parameter, str):
            key, description = parameter, repr(parameter)
        else:
            key, description = id(parameter), f"a tensor of shape {tuple(parameter.shape)}"
        if key not in own_keys:
            raise WakefulError(
                f"axes has {description}, which the optimizer does not: its parameters are "
                f"{', '.join(list(parameters)[:4])}, ..."
            )
        choices[key] = choice
    return lambda name, parameter: choices.get(name, choices.get(id(parameter)))


def _check_axes(name: str, parameter: Tensor, choice: int | tuple[int, ...]) -> tuple[int, ...]:
    """Return the user's choice of a parameter's axes as a tuple.

    Raises:
        WakefulError: the parameter is no matrix, or the axes are not 0, 1 or both.
    """
    axes = (choice,) if isinstance(choice, int) else tuple(choice)
    if axes and (parameter.ndim != 2 or set(axes) - {0, 1} or len(set(axes)) < len(axes)):
        raise WakefulError(
            f"axes = {choice!r} of {name}, whose shape is {tuple(parameter.shape)}: only matrices "
            "are rotated, along axis 0 or 1 or both; () keeps a parameter as it is"
        )
    return axes
