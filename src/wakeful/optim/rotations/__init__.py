"""The rotations of OrthoAdam, one a file: the file's name is the rotation's name."""

import importlib
import pkgutil

from wakeful.errors import WakefulError
from wakeful.optim.rotations.base import Learned, Rotation

__all__ = ["Learned", "Rotation", "find_rotation", "rotation_names"]


def rotation_names() -> tuple[str, ...]:
    """The names of the rotations in this folder, in alphabetical order."""
    return tuple(m.name for m in pkgutil.iter_modules(__path__) if m.name != "base")


def find_rotation(name: str) -> type[Rotation]:
    """The rotation class in the file of that name; a WakefulError names the ones there are."""
    if name not in rotation_names():
        raise WakefulError(
            f"rotation={name!r} is not one of {', '.join(rotation_names())}; "
            "a new one is a file in wakeful/optim/rotations"
        )
    module = importlib.import_module(f"{__name__}.{name}")
    return next(
        member
        for member in vars(module).values()
        if isinstance(member, type)
        and issubclass(member, Rotation)
        and member.__module__ == module.__name__
    )
