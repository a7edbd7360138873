"""The role of a parameter in the model, for the rooms that treat parameters by it.

The module that makes a parameter declares its role in a method `roles()`. Optimizers,
initialization, quantization and heirs ask for roles and know no name. Walking over a model
(`named_parameters()`, `parameters()`, `modules()`, its own or a wrapper's) marks its parameters, so
that `role_of` finds the role of one that comes alone.
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
    """One parameter, as the rest of the library sees it.

    The defaults are what a variant's own parameter is: none of the library's business.
    """

    residual: int | None = None
    """The axis (0 or 1) of a matrix that lies in the residual stream; None where none does, and
    then no optimizer rotates it."""
    vocabulary: bool = False
    """The other axis counts tokens or positions: it is never rotated."""
    embedding: bool = False
    """A table in which tokens or positions are looked up; a tied head is one."""
    decays: bool = False
    """Whether weight decay applies."""
    start: Start = "defined"
    """Normal with the model's deviation; the same, scaled where the model asks for it, for what
    writes to the residual stream; an orthogonal matrix; zeros; or as its module makes it."""
    quantized: bool = False
    """Whether quantization of linear layers covers it."""


READS = Role(residual=1, decays=True, start="normal", quantized=True)
"""The (out, in) matrix of a linear layer whose input is the residual stream."""
WRITES = Role(residual=0, decays=True, start="residual", quantized=True)
"""The (out, in) matrix of a linear layer whose output is added to the residual stream."""
BIAS = Role(start="zeros")
TABLE = Role(residual=1, vocabulary=True, embedding=True, decays=True, start="normal")
"""The (rows, D) matrix of an embedding."""
HEAD = Role(residual=1, vocabulary=True, decays=True, start="normal", quantized=True)
"""The (V, D) matrix of an output head that has one of its own."""


class HasRoles:
    """A module that declares the roles of parameters inside it."""

    others: ClassVar[Role | None] = None
    """The role of every parameter inside it that nobody declares; None: they have none."""

    def roles(self) -> Mapping[str, Role]:
        """Return the roles of parameters by their names inside this module.

        The innermost module that names a parameter decides; names that are absent do no harm.
        """
        return {}


class Marked:
    """What makes a module mark its parameters whenever somebody walks over it.

    A mark is an attribute, which copying and sharding lose: hence at this door, through which
    every enumeration of parameters goes, that of a wrapper included. Whoever takes the first
    parameter alone, to see its device at every token, does not pay for the others.
    """

    def named_modules(
        self,
        memo: set[nn.Module] | None = None,
        prefix: str = "",
        remove_duplicate: bool = True,
    ) -> Generator[tuple[str, nn.Module], None, None]:
        module: Any = super()  # `nn.Module` comes after this class
        marking = _marking(module.__self__)
        marked: set[nn.Module] = set()
        for name, each in module.named_modules(memo, prefix, remove_duplicate):
            while each not in marked and (one := next(marking, None)) is not None:
                marked.add(one)
            yield name, each


def roles_of(model: nn.Module) -> dict[str, Role]:
    """Return the declared roles of a model's parameters by full name, a tied one's once."""
    return {name: role for _, found in _walked(model) for name, _, role in found}


def mark(model: nn.Module) -> None:
    """Mark every parameter that a module of the model declares with its role."""
    for _ in _marking(model):
        pass


def role_of(parameter: Tensor) -> Role | None:
    """Return the role that a parameter was marked with, or None."""
    return getattr(parameter, "_wakeful_role", None)


def _marking(model: nn.Module) -> Iterator[nn.Module]:
    """Mark the parameters of one module after another; yield each when its own are marked."""
    for module, found in _walked(model):
        for _, parameter, role in found:
            parameter._wakeful_role = role  # pyright: ignore[reportAttributeAccessIssue]
        yield module


def _walked(model: nn.Module) -> Iterator[tuple[nn.Module, list[tuple[str, nn.Parameter, Role]]]]:
    """Yield modules in the order of `named_modules`, each with its own parameters of a role."""
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module, Mapping[str, Role], Role | None]] = [("", model, {}, None)]
    while waiting:
        prefix, module, declared, others = waiting.pop()
        if isinstance(module, HasRoles):
            others = others if module.others is None else module.others
            declared = {**declared, **{prefix + k: role for k, role in module.roles().items()}}
        found: list[tuple[str, nn.Parameter, Role]] = []
        for name, parameter in module._parameters.items():
            if parameter is None or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            role = declared.get(prefix + name, others)
            if role is not None:
                found.append((prefix + name, parameter, role))
        yield module, found
        children = [
            (f"{prefix}{name}.", child, declared, others) for name, child in module.named_children()
        ]
        waiting += reversed(children)  # the first child comes off first
