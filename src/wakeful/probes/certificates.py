"""Ranks of heads that are proved, not estimated: bounds, and the spectra that close them.

A is one head's L × L weights, σ_i its singular values, F = ‖A‖_F² = Σ σ_i², and
S_k = Σ_{i≤k} σ_i². rank_τ is the least k with S_k ≥ τF; a pair (low, high) brackets it.

What is used, with G = AᵀA (eigenvalues σ_i²), c1 and c2 the column sums and squared norms:

    σ_1² ≤ ‖A‖_1 ‖A‖_∞ = max c1 · max row sum    so rank ≥ ⌈τF / (max c1 · max row sum)⌉
    S_k ≥ the k largest c2 (Schur–Horn)           so rank ≤ mass columns; rank 1 if max c2 ≥ τF
    S_k(G) ≥ S_k(QᵀGQ) for orthonormal Q          so Ritz values bound the rank from above
    S_k(G) ≤ S_k(QᵀGQ) + F − tr(QᵀGQ)             and from below: AAᵀ = (AQ)(AQ)ᵀ + A(I−QQᵀ)Aᵀ

The eigenvalues of G cost a third of `svdvals`. Three things make them cheaper: causality leaves a
sixth of the products of G; columns that together hold less energy than any step near the threshold
are left out, and what they might add is part of the bounds; and the arithmetic is float32, repeated
in float64 where a bound is too near. What it cannot prove it does not claim.

Shapes: L tokens, m columns of A that are kept, b Ritz values.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wakeful.probes.streaming import AttentionInputs, tiles

_BLOCK = 128
"""Columns of G computed at once."""

_DROPS = (0.1, 0.01, 0.0)
"""Energy that may be left out, as a fraction of the energy of the column at the mass-columns
threshold, a stand-in for σ_k². About one head in twenty then has to be computed again with less of
it left out, and one in ninety in float64."""

_NO_BOUND = 1 << 62


@dataclass(frozen=True)
class RankBounds:
    """Bounds low ≤ rank_τ ≤ high; equal when the rank is known."""

    low: int
    high: int

    @property
    def closed(self) -> bool:
        """Return True if the rank is known."""
        return self.low == self.high

    def meet(self, bounds: "RankBounds") -> "RankBounds":
        """Return the intersection of two bounds on the same rank."""
        return RankBounds(max(self.low, bounds.low), min(self.high, bounds.high))


def column_bounds(
    column_sums: Float[Tensor, "H L"],
    column_energy: Float[Tensor, "H L"],
    largest_row_sum: Float[Tensor, "H"],
    tau: float,
) -> list[RankBounds]:
    """Return bounds of each head's rank from its weights' column sums, squared column norms and
    largest row sum: rank ≥ τ‖A‖_F² / (‖A‖_1 ‖A‖_∞), and rank ≤ `mass_columns`.
    """
    target = tau * column_energy.sum(-1)
    spectral = column_sums.amax(-1) * largest_row_sum  # at least σ_1²
    # A head may have no weight at all: 0 / 0.
    lower = torch.where(target > 0, target / spectral, 0.0)
    # 1e-5 of slack on both sides: the sums were made in float32.
    low = torch.ceil(lower * (1 - 1e-5)).clamp_min(1).long()
    high = mass_columns(column_energy, min(1.0, tau * (1 + 1e-5)))
    # min: rounding must not put the lower bound above the upper one.
    return [RankBounds(min(a, b), b) for a, b in zip(low.tolist(), high.tolist(), strict=True)]


def mass_columns(column_energy: Float[Tensor, "*H L"], tau: float) -> Tensor:
    """Return the least number of columns that hold τ of each head's ‖A‖_F²."""
    held = column_energy.sort(-1, descending=True).values.cumsum(-1)
    return (held < tau * held[..., -1:]).sum(-1) + 1


def subspace_bounds(
    ritz: Float[Tensor, "b"], energy: float, tau: float, slack: float
) -> RankBounds:
    """Bracket the rank by Ritz values θ, the eigenvalues of AᵀA in a subspace, descending:
    S_k(θ) ≤ S_k ≤ S_k(θ) + F − Σ θ.

    S_k is the sum of the k largest σ², `energy` is F, the sum of all. `slack` is the rounding
    error, as a fraction of F, that the bounds must survive.
    """
    # captured[k] = S_k(θ) / F, from k = 0.
    captured = torch.cat([ritz.new_zeros(1), ritz]).double().cumsum(0) / energy
    missing = max(0.0, 1.0 - float(captured[-1]))
    high = _first_true(captured - slack >= tau, _NO_BOUND)
    low = _first_true(captured + missing + slack >= tau, 1)
    return RankBounds(max(1, low), high)


def _first_true(reached: Tensor, otherwise: int) -> int:
    """Return the index of the first true element, `otherwise` if there is none."""
    indices = reached.nonzero()
    return int(indices[0]) if len(indices) else otherwise


def with_trace(eigenvalues: Float[Tensor, "m"], G: Float[Tensor, "m m"]) -> Float[Tensor, "m"]:
    """Return a Gram matrix's eigenvalues in float64, scaled to sum to the matrix's trace; negative
    ones, which come from rounding, become 0.

    Most of the solver's error is a common factor, and the trace is known far better: on a trained
    model's heads the scaling leaves a seventh of the error of partial sums.
    """
    eigenvalues = eigenvalues.double()
    trace = G.diagonal().sum(dtype=torch.float64)
    return (eigenvalues * (trace / eigenvalues.sum())).clamp_min(0)


def matrix_rank(A: Float[Tensor, "L L"], tau: float, *, causal: bool = True) -> int:
    """Return min k: Σ_{i≤k} σ_i² ≥ τ Σ σ_i², by the cheapest method that proves it.

    The columns with the most energy are decomposed. While the bounds do not yet meet, more columns
    are, and at last the whole matrix in float64. `causal` says that A is lower triangular.
    """
    column_energy = A.square().sum(0).double()
    energy = float(column_energy.sum())
    # 1e-5 of slack: the sums may have been made in float32.
    high = int(mass_columns(column_energy, min(1.0, tau * (1 + 1e-5))))
    bounds = RankBounds(1, high)
    if bounds.closed:  # one column alone holds τ of the energy
        return 1
    previous_count = 0
    for drop in _DROPS:
        columns = kept_columns(column_energy, high, drop)
        if len(columns) == previous_count:
            continue  # the same columns would give the same bounds
        part = A if len(columns) == A.shape[1] else A.index_select(1, columns)
        G = gram(part, columns if causal else None)
        bounds = bounds.meet(_spectrum_bounds(G, energy, tau, rounding_error(A.dtype, A.shape[0])))
        if bounds.closed:
            return bounds.high
        previous_count = len(columns)
    return exact_rank(A, tau, causal=causal)


def exact_rank(A: Float[Tensor, "L L"], tau: float, *, causal: bool = True) -> int:
    """Return min k: Σ_{i≤k} σ_i² ≥ τ Σ σ_i² from the whole Gram matrix in float64.

    `causal` says that A is lower triangular, which makes the Gram matrix cheaper.
    """
    all_columns = torch.arange(A.shape[1], device=A.device)
    G = gram(A.double(), all_columns if causal else None)
    # `gram` makes the upper triangle; the solver's values ascend.
    captured = torch.linalg.eigvalsh(G, UPLO="U").flip(0).clamp_min(0).cumsum(0)
    return int((captured < tau * captured[-1]).sum()) + 1


def top_columns_bounds(
    heads: AttentionInputs,
    head: int,
    column_energy: Float[Tensor, "L"],
    tau: float,
    *,
    width: int = 512,
) -> RankBounds:
    """Bracket one head's rank by the Gram matrix of its `width` columns with the most energy.

    It takes one pass over tiles and O(width²) memory, for sequences whose L × L matrix is too
    large.
    """
    columns = column_energy.topk(min(width, heads.length)).indices.sort().values
    G: Tensor | None = None
    for tile in tiles(heads, range(head, head + 1)):
        # columns[low:high] are those among the tile's keys.
        low, high = torch.searchsorted(
            columns, columns.new_tensor([tile.first_key, tile.end_key])
        ).tolist()
        if G is None:
            G = tile.weights.new_zeros(len(columns), len(columns))
        part = tile.weights[0].index_select(1, columns[low:high] - tile.first_key)
        G[low:high, low:high].addmm_(part.T, part)
    assert G is not None
    energy = float(column_energy.sum())
    return _spectrum_bounds(G, energy, tau, rounding_error(G.dtype, heads.length))


def kept_columns(column_energy: Float[Tensor, "L"], high: int, drop: float) -> Int[Tensor, "m"]:
    """Return the indices, ascending, of columns with enough energy to matter for the rank.

    `high` is the number of largest columns that reach the threshold. All columns that are left out
    have together at most `drop` times the energy of the `high`-th largest column.
    """
    ordered, order = column_energy.sort(descending=True)
    remaining = ordered.flip(0).cumsum(0).flip(0)  # energy from this column on
    count = int((remaining > drop * ordered[min(high, len(ordered)) - 1]).sum())
    if count > 0.97 * len(ordered):  # leaving out so few does not pay for copying the others
        return torch.arange(len(ordered), device=column_energy.device)
    return order[:count].sort().values


def gram(A: Float[Tensor, "L m"], columns: Int[Tensor, "m"] | None) -> Float[Tensor, "m m"]:
    """Return AᵀA with its upper triangle alone: entries below the blocks on the diagonal are zero.

    `columns` says that A's columns are those of a lower triangular matrix, and which: column j of
    that matrix is zero above row j, and these rows are skipped. None makes no such assumption.
    """
    m = A.shape[1]
    G = A.new_zeros(m, m)
    blocks = range(0, m, _BLOCK)
    first_rows = [0] * len(blocks) if columns is None else columns[::_BLOCK].tolist()
    for first, first_row in zip(blocks, first_rows, strict=True):
        last = min(first + _BLOCK, m)
        rows = A[first_row:]
        torch.mm(rows[:, :last].T, rows[:, first:last], out=G[:last, first:last])
    return G


def rounding_error(dtype: torch.dtype, size: int) -> float:
    """Return a bound of the rounding error of S_k, the sum of the k largest σ², as a fraction of
    F, the sum of all; in arithmetic of `dtype` with L = `size` tokens.

    ε √L: rounding errors add like a random walk over L. On a trained model's 1,024-token heads
    the largest error of any S_k was a quarter of this bound.
    """
    return torch.finfo(dtype).eps * size**0.5


def _spectrum_bounds(G: Tensor, energy: float, tau: float, slack: float) -> RankBounds:
    eigenvalues = with_trace(torch.linalg.eigvalsh(G, UPLO="U").flip(0), G)
    return subspace_bounds(eigenvalues, energy, tau, slack)
