"""What other rooms need to know of a parameter: its role in the model.

A module declares the roles of its parameters in a method `roles()`, by their names inside it; the
innermost module that names a parameter decides. Optimizers, initialization, quantization and heirs
ask for roles and know no name.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Role:
    """One parameter, as the rest of the library sees it."""

    residual: int | None = None
    """The axis (0 or 1) of a matrix that lies in the residual stream; None where none does."""
    vocabulary: bool = False
    """The other axis counts tokens or positions: it is never rotated."""
    decays: bool = False
    """Whether weight decay applies."""
    start: Literal["normal", "residual", "defined"] = "defined"
    """Normal with the model's deviation, the same scaled for what writes to the residual stream
    (where the model asks for it), or as its module defines it."""
    quantized: bool = False
    """Whether quantization of linear layers covers it."""


@runtime_checkable
class HasRoles(Protocol):
    """A module that declares its parameters' roles."""

    def roles(self) -> Mapping[str, Role]:
        """Return the roles of parameters by their names inside this module."""
        ...


def roles_of(model: nn.Module) -> dict[str, Role]:
    """Return the role of every parameter that a part of the model declares, by its full name."""
    found: dict[str, Role] = {}
    for prefix, module in model.named_modules():  # outer modules first, so that inner ones decide
        if isinstance(module, HasRoles):
            for name, role in module.roles().items():
                found[f"{prefix}.{name}" if prefix else name] = role
    return found


def matrices(module: nn.Module, role: Role, others: Role | None = None) -> dict[str, Role]:
    """Return one role for every matrix inside a module, and another for its vectors and scalars."""
    rest = Role() if others is None else others
    return {name: role if p.ndim >= 2 else rest for name, p in module.named_parameters()}


def mark(
    model: nn.Module, named: Iterator[tuple[str, nn.Parameter]]
) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield parameters with their names, each marked with its role: `role_of` finds it later."""
    roles = roles_of(model)
    for name, parameter in named:
        if name in roles:
            parameter._wakeful_role = roles[name]  # pyright: ignore[reportAttributeAccessIssue]
        yield name, parameter


def role_of(parameter: Tensor) -> Role | None:
    """Return the role that a parameter was marked with, or None."""
    return getattr(parameter, "_wakeful_role", None)
