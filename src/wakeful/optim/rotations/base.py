"""What a rotation is: a fixed orthogonal Q acting on the last axis, made again from its seed.

Shapes: R rows, n the rotated width.
"""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from jaxtyping import Float
from torch import Tensor


class Rotation(ABC):
    """An orthogonal Q ∈ O(n): ``into(g) = g Qᵀ`` and ``back(s) = s Q`` on the rows of a matrix.

    OrthoAdam (From Attention to Activation, Algorithm 1): ḡ = Q g before the moments, s = Qᵀ s̄
    after them. A row of a matrix here is the paper's vector g, so both act on the last axis; the
    optimiser turns a weight whose residual axis comes first.

    A subclass lives alone in its file in this folder, and the file's name is the rotation's name.
    Its constructor takes ``(width, *, generator, device, dtype)`` and its own options after them.
    It draws its numbers from ``generator``, a CPU generator, in float64 and rounds once, so that a
    seed gives one rotation whatever the device. ``into`` and ``back`` take contiguous tensors of
    ``dtype`` and leave them unchanged; ``back`` returns a tensor that its caller may overwrite
    or, where it changes nothing, the one it was given.
    """

    learns: ClassVar[bool] = False
    """True where the basis follows the gradients (see ``Learned``): no seed makes it again."""

    @abstractmethod
    def into(self, grad: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        """The gradient in the optimiser's basis, ḡ = g Qᵀ."""

    @abstractmethod
    def back(self, step: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        """The step in the parameter's basis, s = s̄ Q."""

    @staticmethod
    @abstractmethod
    def memory(width: int, itemsize: int, options: Mapping[str, int | float]) -> int:
        """Bytes that one rotation of this width holds."""

    @staticmethod
    def making_memory(width: int, itemsize: int) -> int:
        """Bytes that making one of this width needs for a moment, on top of what it holds."""
        del width, itemsize
        return 0


class Learned(Rotation):
    """A rotation that follows the gradients; its tensors are state and are saved as such."""

    learns: ClassVar[bool] = True

    @abstractmethod
    def learn(self, grad: Float[Tensor, "R n"]) -> Float[Tensor, "n n"] | None:
        """Take in one gradient. Where the basis moves from Q to Q', returns Q Q'ᵀ, by which a
        moment held in the old basis is multiplied from the right; None where it stays."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """The tensors a checkpoint must hold, by name; written in place by ``learn``."""


def generator_for(seed: int, name: str, axis: int) -> torch.Generator:
    """The CPU generator of one rotation: its seed is a hash of (seed, parameter name, axis)."""
    digest = hashlib.sha256(f"{seed}\x1f{name}\x1f{axis}".encode()).digest()
    generator = torch.Generator(device="cpu")
    generator.manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return generator


def haar_matrix(width: int, generator: torch.Generator) -> Float[Tensor, "n n"]:
    """A matrix of O(n) drawn from the Haar measure, in float64 on the CPU.

    QR of a Gaussian matrix, each column of Q multiplied by the sign of R's diagonal: without that
    fix the law is not Haar's (Mezzadri, How to generate random matrices, 2007, section 5).
    """
    gaussian = torch.randn(width, width, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    return q * torch.where(r.diagonal() < 0, -1.0, 1.0)


def random_signs(width: int, generator: torch.Generator) -> Float[Tensor, " n"]:
    """n independent fair signs, ±1 in float64 on the CPU."""
    return torch.randint(0, 2, (width,), generator=generator).double().mul_(2).sub_(1)
