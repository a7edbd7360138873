"""The plain definitions: the law that the fast paths are tested against.

Every function takes one sequence without padding, in the precision given. Shapes: H heads, L
tokens, d head width, D model width; A[i, j] is the weight query i gives key j.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from wakeful.parts.softmax1 import sink_softmax


def attention_weights(
    q: Float[Tensor, "H L d"],
    k: Float[Tensor, "G S d"],
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sink: Float[Tensor, "*L H"] | None = None,
    keep: Tensor | None = None,
    weigh: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, "H L S"]:
    """Return A_ij = e^{x_ij} / (e^s + Σ_j e^{x_ij}), x the logits, e^s the sink (0 without one).

    The sum is over the pairs of `keep`, or else the causal ones within the window. `weigh` replaces
    the softmax: it makes weights (B, H, L, S) of masked logits.
    """
    heads, length, _ = q.shape
    k = k.repeat_interleave(heads // k.shape[0], dim=0)
    logits = torch.einsum("hld,hsd->hls", q, k) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    if keep is None:
        keep = causal(length, window, q.device)
    logits = logits.masked_fill(~keep, -torch.inf).unsqueeze(0)  # a batch of one
    if weigh is not None:
        return weigh(logits)[0]
    if sink is not None and sink.dim() == 2:  # a sink for each query: the batch's axis is missing
        sink = sink.unsqueeze(0)
    return sink_softmax(logits, sink)[0]


def causal(length: int, window: int | None, device: torch.device) -> Bool[Tensor, "L L"]:
    """Return a mask (query, key), True where a query sees a key: itself and the tokens before it,
    `window` keys in all if given.
    """
    position = torch.arange(length, device=device)
    distance = position.unsqueeze(1) - position
    return (distance >= 0) & (distance < (length if window is None else window))


def token_importance(A: Float[Tensor, "*H L L"]) -> Float[Tensor, "*H L"]:
    """a_j = (1/L) Σ_i A_ij, the mean of column j (Value Residual Learning, eq. 11, as meant).

    Read literally, eq. 11 sums rows, which is a constant.
    """
    return A.mean(-2)


def entropy(importance: Float[Tensor, "*H L"]) -> Float[Tensor, "*H"]:
    """e = −Σ_j a'_j ln a'_j in nats, a' = a / Σ a (eq. 11). LOW means concentrated.

    The official code averages A over heads first: pass the mean importance over heads. The entropy
    is 0 where nothing is attended to.
    """
    total = importance.sum(-1, keepdim=True)
    share = importance / total.clamp_min(torch.finfo(total.dtype).tiny)
    return -torch.xlogy(share, share).sum(-1)


def top_importance(importance: Float[Tensor, "*H L"], k: int) -> Float[Tensor, "*H"]:
    """The k-th largest a_j of a sequence, k from 1 (fig. 11)."""
    return importance.sort(-1, descending=True).values[..., k - 1]


def first_key_share(A: Float[Tensor, "*H L L"], *, with_row_0: bool = True) -> Float[Tensor, "*H"]:
    """The fraction of queries whose largest weight is on key 0 (From Attention to Activation,
    section 5).

    A tie does not count, or uniform attention would be a sink. Query 0 sees key 0 alone, so it
    always counts: `with_row_0=False` leaves it out.
    """
    if not with_row_0:
        A = A[..., 1:, :]
    dominated = A[..., 0] > F.pad(A[..., 1:], (1, 0)).amax(-1)  # a zero in the place of key 0
    return dominated.to(A.dtype).mean(-1)


def first_key_mass(A: Float[Tensor, "*H L L"], *, with_row_0: bool = True) -> Float[Tensor, "*H"]:
    """The mean weight on key 0 (ibid., section 3.1), over all queries or without query 0."""
    return A[..., 0 if with_row_0 else 1 :, 0].mean(-1)


def rank(A: Float[Tensor, "*H L L"], tau: float = 0.9) -> Tensor:
    """min k: Σ_{i≤k} σ_i² ≥ τ Σ σ_i² (When Attention Collapses, section 2): integers.

    The paper's demo passes A averaged over the batch.
    """
    energy = torch.linalg.svdvals(A).square().cumsum(-1)
    return (energy < tau * energy[..., -1:]).sum(-1) + 1


def mass_columns(A: Float[Tensor, "*H L L"], tau: float = 0.9) -> Tensor:
    """The least number of columns that hold τ of ‖A‖_F² (ibid., appendix): integers."""
    energy = A.square().sum(-2).sort(-1, descending=True).values.cumsum(-1)
    return (energy < tau * energy[..., -1:]).sum(-1) + 1


def value_spectrum(v: Float[Tensor, "*G L d"]) -> Float[Tensor, "*G d"]:
    """Eigenvalues of (1/L) Σ v vᵀ, descending (Value Residual Learning, eq. 12): a second moment,
    not centered. One head's values, or a layer's joined along d.
    """
    moment = v.transpose(-1, -2) @ v / v.shape[-2]
    return torch.linalg.eigvalsh(moment).flip(-1).clamp_min(0)


def value_drain(v: Float[Tensor, "*G L d"]) -> Float[Tensor, "*G"]:
    """‖v_0‖ over the mean ‖v_j‖ of the others (fig. 10): under 1 is a drain."""
    norm = torch.linalg.vector_norm(v, dim=-1)
    return norm[..., 0] / norm[..., 1:].mean(-1)


def residual_peak(h: Float[Tensor, "L D"]) -> Tensor:
    """‖h_0‖ over the mean ‖h_j‖ of the others (fig. 10): over 1 is a peak."""
    return value_drain(h)


def token_similarity(h: Float[Tensor, "L D"]) -> Tensor:
    """The mean cosine of two different tokens' hidden states (eq. 13): −1 to 1."""
    unit = F.normalize(h, dim=-1)
    length = h.shape[0]
    return ((unit @ unit.T).sum() - length) / (length * (length - 1))


def kurtosis(h: Float[Tensor, "*L D"]) -> Float[Tensor, "*L"]:
    """E(x−μ)⁴ / (E(x−μ)²)² over channels, each token alone: 3 for a Gaussian, D at most
    (From Attention to Activation, section 4).
    """
    centered = h - h.mean(-1, keepdim=True)
    variance = centered.square().mean(-1)
    return centered.pow(4).mean(-1) / variance.square()


def norm_ratio(h: Float[Tensor, "*L D"]) -> Float[Tensor, "*L"]:
    """‖x‖∞² / ‖x‖₂² over channels (ibid., section 4): 1/D where all are equal, 1 for one alone."""
    square = h.square()
    return square.amax(-1) / square.sum(-1)


def max_activation(h: Float[Tensor, "L D"]) -> Tensor:
    """max |x| over tokens and channels (ibid., section 5), in the residual stream's own units."""
    return h.abs().amax()


def token_max_activation(h: Float[Tensor, "*L D"]) -> Float[Tensor, "*L"]:
    """max |x| over channels of each token: table 2 reports their mean over tokens."""
    return h.abs().amax(-1)


def block_influence(before: Float[Tensor, "L D"], after: Float[Tensor, "L D"]) -> Tensor:
    """1 − mean cos(x_in, x_out) over tokens (ShortGPT): 0 for a block that does nothing."""
    return 1 - F.cosine_similarity(before, after, dim=-1).mean()


def angular_distance(before: Float[Tensor, "L D"], after: Float[Tensor, "L D"]) -> Tensor:
    """arccos(cos(x_in, x_out)) / π at the last token (The Unreasonable Ineffectiveness of the
    Deeper Layers, eq. 8): 0 to 1.
    """
    return F.cosine_similarity(before[-1], after[-1], dim=-1).clamp(-1, 1).arccos() / torch.pi


def even_shares(length: int) -> Float[Tensor, "L"]:
    """Return each key's mean weight if every query attends evenly to all keys that it sees.

    Key j gets (1 / (L − 1)) Σ_{i ≥ j} 1 / (i + 1), query i = 0 left out.
    """
    weight_of_query = 1 / torch.arange(1, length + 1, dtype=torch.float64, device="cpu")
    weight_of_query[0] = 0.0
    return weight_of_query.flip(0).cumsum(0).flip(0) / max(1, length - 1)
