"""Optimizers for any model: OrthoAdam and its rotations, and those that it is compared with."""

from wakeful.optim.axes import RotationPlan
from wakeful.optim.build import build_optimizer, decay_groups, warmup_cosine
from wakeful.optim.muon import MuonAdamW
from wakeful.optim.orthoadam import OrthoAdam
from wakeful.optim.rotations.base import Haar, Identity, LearnedRotation, Rotation, rotation_of
from wakeful.optim.rotations.block_diagonal import BlockDiagonal
from wakeful.optim.rotations.eigenbasis import Eigenbasis
from wakeful.optim.rotations.hadamard import Hadamard

__all__ = [
    "BlockDiagonal",
    "Eigenbasis",
    "Haar",
    "Hadamard",
    "Identity",
    "LearnedRotation",
    "MuonAdamW",
    "OrthoAdam",
    "Rotation",
    "RotationPlan",
    "build_optimizer",
    "decay_groups",
    "rotation_of",
    "warmup_cosine",
]
