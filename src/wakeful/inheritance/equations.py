"""`Equations`: the normal equations of a weighted least squares with a ridge, in float64."""

import contextlib
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.errors import WakefulError


class Equations:
    """Σ w f fᵀ, Σ w f zᵀ and Σ w ‖z‖² of features f and targets z, summed in float64.

    Each part's products are in its own dtype.
    """

    def __init__(self, features: int, width: int, device: torch.device) -> None:
        self.ff = torch.zeros(features, features, dtype=torch.float64, device=device)
        self.fz = torch.zeros(features, width, dtype=torch.float64, device=device)
        self.zz = 0.0

    def add(self, f: Tensor, z: Tensor, weights: Tensor) -> None:
        """Add N tokens: features f (N, features), targets z (N, width) and weights w (N,)."""
        weighted = (f * weights.unsqueeze(1)).T
        with whole_products():
            self.ff += weighted @ f
            self.fz += weighted @ z
        self.zz += float((z.square().sum(1) * weights).sum())

    def error(self, solution: Tensor) -> float:
        """Return Σ w ‖S f − z‖², of a solution Sᵀ."""
        return self.zz + float((solution * (self.ff @ solution - 2 * self.fz)).sum())

    def factored(self, ridge: float, size: int | None = None) -> Tensor:
        """Return the Cholesky factor of Σ w f fᵀ + λ, λ = `ridge` times the mean of the diagonal.

        λ is added to the first `size` entries of the diagonal (None: all), and the mean is over
        these entries too. A bias, which has no penalty, comes after them.

        Raises:
            WakefulError: the matrix is singular.
        """
        damped = self.ff.clone()
        diagonal = damped.diagonal()[:size]  # a view: what is added to it is added to `damped`
        diagonal += ridge * diagonal.mean()
        factor, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            raise WakefulError(
                f"too little text to solve for {len(diagonal)} columns, or their inputs are all "
                "zero or alike: give more --bridge.tokens, or a larger --bridge.ridge than "
                f"{ridge:g}"
            )
        return factor


@contextlib.contextmanager
def whole_products() -> Iterator[None]:
    """Within the context, multiply float32 matrices in float32, even if the user allows torch a
    shorter format.
    """
    allowed = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(allowed)


def stream_weights(stream: Float[Tensor, "N D"]) -> Float[Tensor, "N"]:
    """Return w = 1 / ‖y‖² of each token, y its stream in the reference."""
    return 1 / stream.square().sum(1)
