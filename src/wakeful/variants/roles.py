"""Roles of parameters, which decide on initialization, weight decay, rotation and quantization.

The module that creates a parameter declares its role in a method `roles()`. Optimizers,
initialization, quantization and inheritance use roles, never a parameter's name. Enumerating a
model (by `named_parameters()`, `parameters()` or `modules()`, also of a wrapper) marks its
parameters with their roles, so that `role_of` needs the parameter alone.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:  # options of the command line are read without torch
    from torch import Tensor, nn

Start = Literal["normal", "residual", "orthogonal", "zeros", "defined"]


@dataclass(frozen=True, kw_only=True)
class Role:
    """Properties of a parameter that decide how other packages treat it.

    The defaults are the role of a variant's own parameter: not decayed, rotated or quantized.
    """

    residual: int | None = None
    """The axis (0 or 1) of a matrix that lies in the residual stream; None where none does, and
    then no optimizer rotates it."""
    vocabulary: bool = False
    """The other axis counts tokens or positions: it is never rotated."""
    embedding: bool = False
    """A table in which tokens or positions are looked up; a tied head is one."""
    decays: bool = False
    """True if weight decay applies."""
    start: Start = "defined"
    """Initial values: normal with the model's standard deviation; "residual", the same, scaled with
    depth if the model is configured so; an orthogonal matrix; zeros; or "defined" by its module."""
    quantized: bool = False
    """True if quantization of linear layers covers it."""


READS = Role(residual=1, decays=True, start="normal", quantized=True)
"""The (out, in) matrix of a linear layer whose input is the residual stream."""
WRITES = Role(residual=0, decays=True, start="residual", quantized=True)
"""The (out, in) matrix of a linear layer whose output is added to the residual stream."""
BIAS = Role(start="zeros")
TABLE = Role(residual=1, vocabulary=True, embedding=True, decays=True, start="normal")
"""The (rows, D) matrix of an embedding."""
HEAD = Role(residual=1, vocabulary=True, decays=True, start="normal", quantized=True)
"""The (V, D) matrix of an output head that is not tied."""


class HasRoles:
    """A module that declares the roles of parameters inside it."""

    default_role: ClassVar[Role | None] = None
    """Role of all parameters inside the module that are not declared; None: no role."""

    def roles(self) -> Mapping[str, Role]:
        """Return the roles of parameters by their names inside this module. Roles decide on
        initialization, weight decay, rotation and quantization.

        If several modules around a parameter name it, the innermost decides. Names that no
        parameter has are ignored.
        """
        return {}


class RoleMarks:
    """Mixin of modules that mark their parameters with roles whenever they are enumerated.

    A mark is an attribute, which copying and sharding lose. All enumerations of parameters, also
    those of a wrapper, call `named_modules`, which therefore sets the marks. It marks lazily, so
    that reading the first parameter's device costs little.
    """

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Generator[tuple[str, nn.Module], None, None]:
        """Yield (name, module) for this module and all inside it, as `nn.Module` does; before each
        is yielded, its parameters are marked with their roles.

        The arguments are those of `nn.Module.named_modules`.
        """
        base: Any = super()  # `nn.Module`, which comes after this class
        modules_to_mark = _mark_modules(base.__self__)  # each `next` marks one module
        marked: set[nn.Module] = set()
        for name, module in base.named_modules(memo, prefix, remove_duplicate):
            # Both iterators go in the same order, but this one leaves out modules that are in
            # `memo`: mark modules until it is this one's turn.
            while module not in marked:
                just_marked = next(modules_to_mark, None)
                if just_marked is None:
                    break
                marked.add(just_marked)
            yield name, module


def roles_of(model: nn.Module) -> dict[str, Role]:
    """Return the declared roles of a model's parameters by their full names.

    A parameter that several modules share, such as a tied head's, has its first name only.
    """
    roles: dict[str, Role] = {}
    for _, parameters in _iterate_roles(model):
        roles |= {name: role for name, _, role in parameters}
    return roles


def mark_roles(model: nn.Module) -> None:
    """Mark every parameter of a model that has a declared role with that role."""
    for _ in _mark_modules(model):
        pass


def role_of(parameter: Tensor) -> Role | None:
    """Return the role that a parameter was marked with, or None."""
    return getattr(parameter, "_wakeful_role", None)


def _mark_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Mark the parameters of a model with their roles, module by module; yield each module as soon
    as the parameters directly in it are marked.
    """
    for module, parameters in _iterate_roles(model):
        for _, parameter, role in parameters:
            parameter._wakeful_role = role  # pyright: ignore[reportAttributeAccessIssue]
        yield module


def _iterate_roles(
    model: nn.Module,
) -> Iterator[tuple[nn.Module, list[tuple[str, nn.Parameter, Role]]]]:
    """Yield (module, parameters) for each module of a model, in the order of `named_modules`.

    `parameters` has (full name, parameter, role) of each parameter directly in the module that has
    a role. The role is the one that `roles()` of the innermost module around the parameter declares
    for it, else the innermost `default_role`.
    """
    visited: set[int] = set()  # a parameter that modules share is yielded once
    # A stack of (prefix of names, module, roles declared by modules around it, default role).
    stack: list[tuple[str, nn.Module, Mapping[str, Role], Role | None]] = [("", model, {}, None)]
    while stack:
        prefix, module, declared, default = stack.pop()
        if isinstance(module, HasRoles):
            if module.default_role is not None:
                default = module.default_role
            # Later ones, of inner modules, replace those of the modules around them.
            declared = {
                **declared,
                **{prefix + name: role for name, role in module.roles().items()},
            }
        parameters: list[tuple[str, nn.Parameter, Role]] = []
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in visited:
                continue
            visited.add(id(parameter))
            role = declared.get(prefix + name, default)
            if role is not None:
                parameters.append((prefix + name, parameter, role))
        yield module, parameters
        children = [
            (f"{prefix}{name}.", child, declared, default)
            for name, child in module.named_children()
        ]
        stack += reversed(children)  # the first child comes off first
