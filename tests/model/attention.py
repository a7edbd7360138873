"""Shapes and masks of attention, and the written-out definition of it."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


class Case(NamedTuple):
    """L queries at the end of S keys, H query heads on G key heads; what masks them."""

    L: int
    S: int
    H: int = 4
    G: int = 4
    mask: str = "causal"


CASES = {
    "one token": Case(1, 1),
    "odd": Case(7, 7),
    "grouped": Case(13, 13, 4, 2),
    "one key head": Case(9, 9, 4, 1),
    "past one block of the kernel": Case(67, 67, 2, 1),
    "decoding": Case(1, 11, 4, 2),
    "a chunk after a prompt": Case(5, 11, 4, 2),
    "padding": Case(9, 9, 4, 2, mask="padding"),
    "padding and a chunk": Case(4, 9, 4, 1, mask="padding"),
    "blind rows": Case(9, 9, 4, 2, mask="blind"),
    "nobody sees anything": Case(3, 5, 2, 2, mask="nothing"),
    "any pairs": Case(8, 5, 2, 1, mask="random"),
    "one mask for all": Case(6, 6, 2, 2, mask="shared"),
}
SINKS = ["softmax", "softmax1", "learned"]
B, d = 2, 8


def heads(case: Case, *, dtype=torch.float64, size: float = 1.0, seed: int = 0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator, dtype=torch.float64) * size
        return values.to(device=device, dtype=dtype).requires_grad_()

    q, k, v = drawn(B, case.L, case.H, d), drawn(B, case.S, case.G, d), drawn(B, case.S, case.G, d)
    return q, k, v, drawn(case.H)


def sink_of(name: str, drawn: Tensor) -> Tensor | None:
    return {"softmax": None, "softmax1": torch.zeros_like(drawn), "learned": drawn}[name]


def by_queries(sink: Tensor, queries: int) -> Tensor:
    """Return a sink of its own for each query, (B, L, H), made of one for each head."""
    slopes = torch.linspace(-1, 2, B * queries).double().view(B, queries, 1)
    return (sink * slopes).detach().requires_grad_()


def keep_of(case: Case) -> Tensor | None:
    """Return the mask that the call is given, None where causality says it all."""
    L, S = case.L, case.S
    seen = torch.arange(S) <= torch.arange(S - L, S)[:, None]
    real = torch.arange(S) >= torch.tensor([[0], [3]])  # the second text has three tokens less
    generator = torch.Generator().manual_seed(9)
    match case.mask:
        case "padding":
            return seen & real[:, None]
        case "blind":
            return seen & (torch.arange(L) % 3 != 1)[:, None].expand(B, L, S)
        case "nothing":
            return torch.zeros(B, L, S, dtype=torch.bool)
        case "random":
            return torch.rand(B, L, S, generator=generator) < 0.4
        case "shared":
            return (torch.rand(1, L, S, generator=generator) < 0.5) & seen
    return None


def plain_keep(case: Case) -> Tensor:
    """Return who sees whom, pair by pair."""
    given = keep_of(case)
    if given is not None:
        return given.expand(B, -1, -1)
    seen = torch.zeros(case.L, case.S, dtype=torch.bool)
    for row in range(case.L):
        place = case.S - case.L + row
        for key in range(case.S):
            seen[row, key] = key <= place
    return seen.expand(B, -1, -1)


def definition(q, k, v, sinks, keep, scale) -> Tensor:
    """Return Σ_j p_j v_j, p_j = e^{x_j} / (e^s + Σ e^x), head by head; zero for a blind query."""
    out = []
    for head in range(q.shape[2]):
        sink = None if sinks is None else sinks[..., head, None]
        group = head * k.shape[2] // q.shape[2]
        x = scale * q[:, :, head] @ k[:, :, group].transpose(1, 2)
        top = x.detach().masked_fill(~keep, -math.inf).amax(-1, keepdim=True)
        top = top.clamp_min(-1e300) if sink is None else torch.maximum(top, sink.detach())
        e = torch.where(keep, torch.exp(torch.where(keep, x, 0) - torch.where(keep, top, 0)), 0)
        total = e.sum(-1, keepdim=True)
        if sink is not None:
            total = total + torch.exp(sink - top)
        out.append(torch.where(total > 0, e / torch.where(total > 0, total, 1), 0) @ v[:, :, group])
    return torch.stack(out, dim=2)
