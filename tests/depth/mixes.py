"""The plain definitions of depth mixes that say what a sublayer reads.

Each is a function reads(m, s) of `routes.reference.Model`: m.f[0] is the embedding, m.f[s] what
sublayer s put out, and the final norm is sublayer 2N + 1.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from routes.reference import Model


def attention_residuals(layers: int) -> Callable:
    """Sums of the outputs of `layers` layers; 0: each output by itself."""

    def reads(m: Model, s: int) -> Tensor:
        if s == 1:
            return m.f[0]
        size = 2 * layers or 1
        starts = range(1, s, size)
        blocks = [m.f[0], *(sum(m.f[start : min(start + size, s)]) for start in starts)]
        w = m.w[f"depth.queries.{s}"]
        scores = [
            ((v / torch.sqrt((v * v).mean(-1, keepdim=True) + 1e-6)) * w).sum(-1) for v in blocks
        ]
        total = sum(torch.exp(score) for score in scores)
        return sum(
            (torch.exp(score) / total)[..., None] * v
            for score, v in zip(scores, blocks, strict=True)
        )

    return reads


def hyper_connections(m: Model, s: int) -> Tensor:
    n = len(m.w["depth.depth.0"])
    streams = [m.f[0]] * n
    for sublayer in range(s):
        if sublayer == 2 * m.N:
            return sum(streams) / n
        a = [list(row) for row in m.w[f"depth.width.{sublayer}"]]
        b = list(m.w[f"depth.depth.{sublayer}"])
        if f"depth.maps.{sublayer}.weight" in m.w:
            scales = m.w[f"depth.scales.{sublayer}"]
            for i, h in enumerate(streams):
                centered = h - h.mean(-1, keepdim=True)
                normed = centered / torch.sqrt((centered**2).mean(-1, keepdim=True) + 1e-5)
                added = torch.tanh(normed @ m.w[f"depth.maps.{sublayer}.weight"].T)
                for j in range(n + 1):
                    a[i][j] = a[i][j] + scales[0] * added[..., j : j + 1]
                b[i] = b[i] + scales[1] * added[..., n + 1 :]
        read = sum(a[i][0] * streams[i] for i in range(n))
        if sublayer == s - 1:
            return read
        kept = [sum(a[i][j + 1] * streams[i] for i in range(n)) for j in range(n)]
        streams = [kept[j] + b[j] * m.f[sublayer + 1] for j in range(n)]
    raise AssertionError


def manifold(m: Model, s: int) -> Tensor:
    """mHC, or iHC where there are no logits for mixing, over n streams written out."""
    weights, biases = ([m.w[f"depth.{kind}.{i}"] for i in range(s)] for kind in ("maps", "biases"))
    n, D = len(m.w[f"depth.biases.{2 * m.N}"]), m.f[0].shape[-1]
    streams = [m.f[0]] * n
    for sublayer, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        alpha = m.w[f"depth.scales.{sublayer}"]
        size = torch.sqrt(sum((H * H).sum(-1, keepdim=True) for H in streams) / (n * D) + 1e-6)
        count = len(bias)
        logits = sum(
            H / size @ weight[i * count : (i + 1) * count].T for i, H in enumerate(streams)
        )

        def moved(k: int, logits=logits, alpha=alpha, bias=bias) -> Tensor:
            """Return the k-th logit of every token, (B, L, 1)."""
            return alpha[min(k // n, 2)] * logits[..., k : k + 1] + bias[k]

        a = [1 / (1 + torch.exp(-moved(i))) for i in range(n)]
        read = sum(a[i] * streams[i] for i in range(n))
        if sublayer == s - 1:
            return read
        b = [2 / (1 + torch.exp(-moved(n + j))) for j in range(n)]
        M = [[1.0 * (i == j) for j in range(n)] for i in range(n)]
        if count > 2 * n:
            e = [[torch.exp(moved(2 * n + i * n + j)) for j in range(n)] for i in range(n)]
            M = [[e[i][j] / sum(e[i]) + 1e-6 for j in range(n)] for i in range(n)]
            for turn in range(20):
                if turn:
                    M = [[M[i][j] / (sum(M[i]) + 1e-6) for j in range(n)] for i in range(n)]
                columns = [sum(M[i][j] for i in range(n)) + 1e-6 for j in range(n)]
                M = [[M[i][j] / columns[j] for j in range(n)] for i in range(n)]
        streams = [
            sum(M[i][j] * streams[i] for i in range(n)) + b[j] * m.f[sublayer + 1] for j in range(n)
        ]
    raise AssertionError


def mudd(m: Model, s: int) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    if s == 1:
        return m.f[0]
    if s % 2 == 0:
        stream = mudd_ways(m, (s - 1) // 2)[-1] if s > 2 else m.f[0]
        return stream + m.f[s - 1]
    ways = mudd_ways(m, s // 2)
    return tuple(ways[:3]) if len(ways) == 4 else ways[0]


def mudd_ways(m: Model, n: int) -> list[Tensor]:
    """Return the four mixes after block n, or one after the last."""
    last = m.X[n]
    normed = last / torch.sqrt((last * last).mean(-1, keepdim=True) + 1e-6)
    hidden = normed @ m.w[f"depth.into.{n}.weight"].T
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / math.sqrt(2)))
    moving = hidden @ m.w[f"depth.out.{n}"].T
    fixed = m.w[f"depth.fixed.{n}"]
    return [
        sum((fixed[c, j] + moving[..., c * (n + 1) + j])[..., None] * m.X[j] for j in range(n + 1))
        for c in range(len(fixed))
    ]


READS: dict[str, Callable] = {
    "attention_residuals": attention_residuals(0),
    "attention_residuals(layers=1)": attention_residuals(1),
    "attention_residuals(layers=3)": attention_residuals(3),
    "hyper_connections": hyper_connections,
    "hyper_connections(streams=1)": hyper_connections,
    "hyper_connections(streams=3, dynamic=False)": hyper_connections,
    "mhc": manifold,
    "mhc(streams=1)": manifold,
    'mhc(streams=3, mixing="identity")': manifold,
    "mudd": mudd,
}
