"""The eigenbasis of the gradients' covariance, the modern comparison: a basis that is learned."""

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.optim.rotations.base import LearnedRotation


class Eigenbasis(LearnedRotation):
    """Q's rows are the eigenvectors of C ← β C + (1 − β) gᵀ g, refreshed every few steps.

    SOAP (Improving and Stabilizing Shampoo using Adam, 2024, Algorithm 3) on the rotated side. At
    the first gradient Q comes from a full decomposition; afterwards every `every` steps from one
    orthogonal iteration, the QR of C Qᵀ, with R's diagonal made positive so that each vector stays
    near the one before. The first moment is carried to the new basis exactly and the second is
    kept, as in SOAP. Deviations: the first step is taken, not skipped, and vectors are not sorted
    again.

    It holds two n × n matrices a weight, and both are state: no seed gives them again.
    """

    examples = ("eigenbasis", "eigenbasis(beta=0.9, every=5)")

    def __init__(self, *, beta: float = 0.95, every: int = 10) -> None:
        if not 0 <= beta < 1:
            raise WakefulError(f"beta of the eigenbasis rotation must be in [0, 1), got {beta}")
        if every < 1:
            raise WakefulError(f"every of the eigenbasis rotation must be at least 1, got {every}")
        self.beta = beta
        self.every = every

    def draw(
        self, width: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Start at the identity, with no gradient seen: nothing is random, and `generator` is not
        used.
        """
        self.basis = torch.eye(width, device=device, dtype=dtype)
        self.covariance = torch.zeros(width, width, device=device, dtype=dtype)
        self.seen = torch.zeros((), dtype=torch.float32, device="cpu")

    def into(self, grad: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return grad @ self.basis.mT

    def back(self, step: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return step @ self.basis

    def learn(self, grad: Float[Tensor, "R n"]) -> Float[Tensor, "n n"] | None:
        """Update the running mean of gᵀg. At the first gradient, and then in every `every`-th step,
        turn the basis towards the mean's eigenvectors and return the change of basis.

        At the first gradient the basis becomes the eigenvectors; later one orthogonal iteration
        brings it nearer to them. Return None in other steps.
        """
        is_first = self.seen.item() == 0
        self.seen += 1
        self.covariance.lerp_(grad.mT @ grad, 1.0 if is_first else 1 - self.beta)
        if is_first:
            # eigh's eigenvalues ascend: the largest comes first.
            vectors = torch.linalg.eigh(self.covariance).eigenvectors.flip(-1)
        elif self.seen.item() % self.every == 0:
            vectors, r = torch.linalg.qr(self.covariance @ self.basis.mT)
            # QR's signs are arbitrary: choose those by which each vector stays near its last value.
            vectors = vectors * torch.where(r.diagonal() < 0, -1.0, 1.0).to(r.dtype)
        else:
            return None
        change = self.basis @ vectors
        self.basis.copy_(vectors.mT)
        return change

    def state(self) -> dict[str, Tensor]:
        return {"basis": self.basis, "covariance": self.covariance, "seen": self.seen}
