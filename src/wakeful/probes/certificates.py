"""Bounds on rank_τ that are proved, not estimated.

A is one head's L × L weights, σ_i its singular values, F = ‖A‖_F² = Σ σ_i², and
S_k = Σ_{i≤k} σ_i². rank_τ is the least k with S_k ≥ τF; a pair (low, high) brackets it.

What is used, with G = AᵀA (eigenvalues σ_i²), c1 and c2 the column sums and squared norms:

    σ_1² ≤ ‖A‖_1 ‖A‖_∞ = max c1 · max row sum    so rank ≥ ⌈τF / (max c1 · max row sum)⌉
    S_k ≥ the k largest c2 (Schur–Horn)           so rank ≤ mass columns; rank 1 if max c2 ≥ τF
    S_k(G) ≥ S_k(QᵀGQ) for orthonormal Q          so Ritz values bound the rank from above
    S_k(G) ≤ S_k(QᵀGQ) + F − tr(QᵀGQ)             and from below: AAᵀ = (AQ)(AQ)ᵀ + A(I−QQᵀ)Aᵀ

and, when the residuals of the Ritz pairs are known, the sharper bound of `ritz_bounds`.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class RankBounds:
    """low ≤ rank_τ ≤ high; equal when the rank is known."""

    low: int
    high: int

    @property
    def closed(self) -> bool:
        """Whether the rank is known."""
        return self.low == self.high

    def meet(self, other: "RankBounds") -> "RankBounds":
        """Return what both say together."""
        return RankBounds(max(self.low, other.low), min(self.high, other.high))


def column_bounds(
    column_sums: Float[Tensor, "H L"],
    column_energy: Float[Tensor, "H L"],
    largest_row_sum: Float[Tensor, "H"],
    tau: float,
) -> list[RankBounds]:
    """Return each head's bounds from what the tile pass knows."""
    target = tau * column_energy.sum(-1)
    spectral = column_sums.amax(-1) * largest_row_sum
    # The sums were made in float32: the bounds allow for it.
    low = torch.ceil(target / spectral * (1 - 1e-5)).clamp_min(1).long()
    high = mass_columns(column_energy, min(1.0, tau * (1 + 1e-5)))
    return [RankBounds(min(a, b), b) for a, b in zip(low.tolist(), high.tolist(), strict=True)]


def mass_columns(column_energy: Float[Tensor, "*H L"], tau: float) -> Tensor:
    """Return the least number of columns that hold τ of each head's ‖A‖_F²."""
    held = column_energy.sort(-1, descending=True).values.cumsum(-1)
    return (held < tau * held[..., -1:]).sum(-1) + 1


def subspace_bounds(
    ritz: Float[Tensor, "b"], energy: float, tau: float, slack: float
) -> RankBounds:
    """Bracket the rank by Ritz values θ, descending: S_k(θ) ≤ S_k ≤ S_k(θ) + F − Σ θ.

    `slack` is the rounding error, as a fraction of F, that the bounds must survive.
    """
    captured = torch.cat([ritz.new_zeros(1), ritz]).double().cumsum(0) / energy
    missing = max(0.0, 1.0 - float(captured[-1]))
    high = _first(captured - slack >= tau, _NO_BOUND)
    low = _first(captured + missing + slack >= tau, 1)
    return RankBounds(max(1, low), high)


def ritz_bounds(
    ritz: Float[Tensor, "b"],
    residual: Float[Tensor, "b"],
    outside: float,
    energy: float,
    tau: float,
    slack: float,
    dropped: float = 0.0,
) -> RankBounds:
    """Bracket the rank by Ritz pairs (θ_i, y_i) of G, ‖G y_i − θ_i y_i‖ = `residual`.

    `outside` is ‖G − YΘYᵀ‖_F, at least the norm of what is orthogonal to the Ritz vectors, and
    `dropped` the energy of columns left out of G altogether, which adds to every S_k at most.
    Split by the first m Ritz vectors: G = [[Θ, Eᵀ], [E, R]] with ‖E‖_F² = Σ_{i≤m} ‖r_i‖².
    For every δ > 0 (Young's inequality),

        G ⪯ (Θ + EᵀE / δ) ⊕ (R + δI),   so, where ‖R‖_2 + δ ≤ θ_k,   S_k ≤ Σ_{i≤k} θ_i + ‖E‖_F² / δ

    and δ = θ_k − ‖R‖_2 is the best choice. ‖R‖_2 is at most `outside` for m = b, and for m < b at
    most the norm of [[θ_{m+1}, ε], [ε, outside]], ε² = Σ_{i>m} ‖r_i‖². Every k and m ≥ k is tried.
    A Krylov space that has missed an eigenvector has a large `outside`, so it closes nothing.
    """
    plain = subspace_bounds(ritz, energy, tau, slack)
    theta, error = ritz.double() / energy, (residual.double() / energy).square()
    beyond_space = outside / energy + slack
    coupled = error.cumsum(0)
    later = torch.cat([theta[1:], theta.new_zeros(1)])
    link = coupled[-1] - coupled
    beyond = (later + beyond_space) / 2 + (((later - beyond_space) / 2).square() + link).sqrt()
    delta = theta.unsqueeze(1) - beyond  # row k, column m
    useful = (delta > 0) & torch.ones_like(delta, dtype=torch.bool).triu()
    extra = torch.where(useful, coupled / delta.clamp_min(1e-300), math.inf).amin(1)
    reach = theta.cumsum(0) + extra + dropped / energy + slack  # at least S_k / F, k = 1 … b
    short = (reach < tau).nonzero()
    low = int(short[-1]) + 2 if len(short) else 1
    return plain.meet(RankBounds(low, plain.high))


_NO_BOUND = 1 << 62


def _first(reached: Tensor, otherwise: int) -> int:
    """Return the first k, counted from 0, that reaches the target."""
    found = reached.nonzero()
    return int(found[0]) if len(found) else otherwise
