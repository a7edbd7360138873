"""The plain definitions of depth mixes that say what a sublayer reads.

Each is a function reads(m, s) of `routes.reference.Model`: m.f[0] is the embedding, m.f[s] what
sublayer s put out, and the final norm is sublayer 2N + 1.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from routes.reference import Model


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
    "hyper_connections": hyper_connections,
    "hyper_connections(streams=1)": hyper_connections,
    "hyper_connections(streams=3, dynamic=False)": hyper_connections,
    "mudd": mudd,
}
