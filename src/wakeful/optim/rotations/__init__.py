"""The rotations of OrthoAdam: a file's name is its rotation's name, in `base` a class's."""

from wakeful.optim.rotations.base import (
    Haar,
    Identity,
    Learned,
    Rotation,
    SignedPermutation,
    generator_for,
    rotation_of,
)
from wakeful.optim.rotations.block_diagonal import BlockDiagonal
from wakeful.optim.rotations.eigenbasis import Eigenbasis
from wakeful.optim.rotations.hadamard import Hadamard

__all__ = [
    "BlockDiagonal",
    "Eigenbasis",
    "Haar",
    "Hadamard",
    "Identity",
    "Learned",
    "Rotation",
    "SignedPermutation",
    "generator_for",
    "rotation_of",
]
