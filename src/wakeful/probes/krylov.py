"""A block Krylov space of a Gram matrix, for ranks that are small beside its size.

Shapes: m columns, p block width, b = dimension of the space.

The space grows until its Ritz pairs close the bracket of `ritz_bounds` or it is so large that the
whole spectrum is cheaper. What it cannot prove it does not claim.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.probes.certificates import RankBounds, ritz_bounds


def krylov_bounds(
    G: Float[Tensor, "m m"],
    energy: float,
    tau: float,
    *,
    slack: float,
    dropped: float,
    width: int = 64,
    limit: int | None = None,
) -> RankBounds:
    """Bracket rank_τ by Ritz pairs of G, whose upper triangle is read.

    Args:
        energy: F of the whole matrix.
        slack: rounding error as a fraction of F.
        dropped: energy of the columns that G leaves out.
        width: p; the first block is the p columns with the most energy.
        limit: the largest b; a quarter of m where not given.
    """
    size = G.shape[0]
    limit = size // 4 if limit is None else limit
    width = min(width, size)
    G = G.triu() + G.triu(1).T
    leading = G.diagonal().topk(width).indices
    # The columns themselves span A's best coordinates; one product is already made: G's columns.
    block = torch.linalg.qr(G[:, leading]).Q
    space, image = block, G @ block
    bounds = RankBounds(1, 1 << 62)
    while True:
        bounds = bounds.meet(_bracket(G, space, image, energy, tau, slack, dropped))
        if bounds.closed or space.shape[1] + width > limit:
            return bounds
        fresh = image[:, -width:]
        for _ in range(2):  # twice is enough (Kahan): the second pass restores orthogonality
            fresh = fresh - space @ (space.T @ fresh)
        block = torch.linalg.qr(fresh).Q
        block = block - space @ (space.T @ block)
        block = torch.linalg.qr(block).Q
        space = torch.cat([space, block], dim=1)
        image = torch.cat([image, G @ block], dim=1)


def with_trace(eigenvalues: Float[Tensor, "m"], G: Float[Tensor, "m m"]) -> Float[Tensor, "m"]:
    """Return a matrix's eigenvalues in float64, scaled so that their sum is its trace.

    The solver's error is mostly one factor for all of them, and the trace is known far better: on
    a trained model's heads this leaves a seventh of the error of their partial sums.
    """
    eigenvalues = eigenvalues.double()
    trace = G.diagonal().sum(dtype=torch.float64)
    return (eigenvalues * (trace / eigenvalues.sum())).clamp_min(0)


def _bracket(
    G: Tensor,
    space: Tensor,
    image: Tensor,
    energy: float,
    tau: float,
    slack: float,
    dropped: float,
) -> RankBounds:
    small = space.T @ image
    theta, rotation = torch.linalg.eigh((small + small.T) / 2)
    theta, rotation = with_trace(theta.flip(0), small).to(small.dtype), rotation.flip(1)
    captured = float(theta.sum(dtype=torch.float64))
    if captured < (tau - slack) * energy:
        return RankBounds(1, 1 << 62)  # too little of the energy is in the space to say anything
    Y = space @ rotation
    residual = torch.linalg.vector_norm(image @ rotation - Y * theta, dim=0)
    outside = float(torch.linalg.vector_norm(torch.addmm(G, Y * theta, Y.T, alpha=-1)))
    return ritz_bounds(theta, residual, outside, energy, tau, slack, dropped)
