"""Rotations: fixed orthogonal matrices Q on the last axis, reproducible from a seed.

Shapes: R rows, n the rotated width.
"""

import copy
from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.parts.orthoadam import haar_matrix
from wakeful.variants import Variant, build


class Rotation(Variant, ABC):
    """An orthogonal Q ∈ O(n): `into(g) = g Qᵀ` and `back(s) = s Q` on the rows of a matrix.

    OrthoAdam (From Attention to Activation, Algorithm 1): ḡ = Q g before the moments, s = Qᵀ s̄
    after them. A row of a matrix here is the paper's vector g, so both act on the last axis; the
    optimizer turns a weight whose rotated axis comes first.

    A subclass's constructor takes the rotation's own options; `for_width` returns a copy at a
    width, whose tensors `draw` makes. Another file in this folder adds the rotation of its name.
    """

    def for_width(
        self,
        width: int,
        *,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "Rotation":
        """Return a copy of this rotation for n = `width` coordinates, with the tensors that `draw`
        makes, on `device` in `dtype`.
        """
        rotation = copy.copy(self)
        rotation.draw(width, generator, torch.device(device), dtype)
        return rotation

    @abstractmethod
    def draw(
        self, width: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Make the tensors of a random Q of this width.

        An override draws random numbers from `generator`, which is on the CPU, in float64, and
        rounds them once to `dtype`: a seed then gives the same rotation on every device. It passes
        `device="cpu"` when it draws, since torch's default device may be another.
        """

    @abstractmethod
    def into(self, grad: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        """Return the gradient in the optimizer's basis, ḡ = g Qᵀ; `grad` is left unchanged."""

    @abstractmethod
    def back(self, step: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        """Return the step in the parameter's basis, s = s̄ Q, leaving `step` unchanged.

        The caller may overwrite the result, which is `step` itself where nothing changes.
        """


class LearnedRotation(Rotation):
    """A rotation that follows the gradients; its tensors are state and are saved as such."""

    @abstractmethod
    def learn(self, grad: Float[Tensor, "R n"]) -> Float[Tensor, "n n"] | None:
        """Learn from one gradient; return the change of basis, or None if the basis stays.

        The change from the basis Q to Q' is Q Q'ᵀ. The caller multiplies its moments, which are in
        the old basis, by it from the right.
        """

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Return the tensors a checkpoint must hold, by name; `learn` changes them in place."""


def rotation_of(rotation: str | Rotation) -> Rotation:
    """Return a rotation from an expression such as "block_diagonal(size=32)"; a rotation is
    returned as it is.
    """
    return rotation if isinstance(rotation, Rotation) else build("optim.rotations", rotation)


class Identity(Rotation):
    """Q = I: OrthoAdam with it is AdamW, step for step."""

    examples = ("identity",)

    def draw(
        self, width: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype
    ) -> None: ...

    def into(self, grad: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return grad

    def back(self, step: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return step


class Haar(Rotation):
    """Q from the Haar measure on O(n), the paper's: one dense matrix a weight, O(n²) a row.

    The matrix comes from LAPACK in float64: the same seed gives the same bits on one machine and
    the same values to about 1e-15 on another whose LAPACK orders its sums differently.
    """

    examples = ("haar",)

    def draw(
        self, width: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.matrix = haar_matrix(width, generator).to(device, dtype)

    def into(self, grad: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return grad @ self.matrix.mT

    def back(self, step: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return step @ self.matrix
