"""MUDDFormer: per-token weights over earlier blocks for queries, keys, values and the stream."""

import torch
from torch import Tensor, nn

from wakeful.depth import State, SublayerMix
from wakeful.shape import Shape


class DynamicDense(SublayerMix):
    """X^s_n = Σ_{j≤n} (a^s_{n,j} + tanh(w^s_{n,j} · X_n / D)) X_j for s = q, k, v, r.

    After MUDDFormer (arXiv 2502.12170).
    a is one-hot and w zero at the start: the plain stream. X_n is the output of block n.
    """

    name = "dynamic_dense"
    examples = ("dynamic_dense",)
    neutral = "dynamic_dense"

    def attach(self, shape: Shape) -> None:
        super().attach(shape)
        self.fixed, self.moving = nn.ParameterDict(), nn.ParameterDict()
        for n in range(shape.num_layers + 1):
            streams = 1 if n == shape.num_layers else 4
            start = torch.zeros(streams, n + 1)
            start[:, n] = 1.0
            self.fixed[str(n)] = nn.Parameter(start)
            self.moving[str(n)] = nn.Parameter(torch.zeros(streams, n + 1, shape.width))

    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        return self._read((x,))

    def step(self, number: int, x: Tensor, out: Tensor, state: State) -> tuple[Tensor, State]:
        x = x + out
        return (x, state) if number % 2 else self._read((*state[3:], x))

    def projected(self, number: int, x: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = state[:3]
        return query, key, value

    def _read(self, outputs: State) -> tuple[Tensor, State]:
        n = str(len(outputs) - 1)
        last = outputs[-1]
        moving = torch.einsum("bld,sjd->sjbl", last, self.moving[n].to(last.dtype))
        weights = self.fixed[n].to(last.dtype)[:, :, None, None] + (moving / last.shape[-1]).tanh()
        streams = torch.einsum("sjbl,jbld->sbld", weights, torch.stack(outputs)).unbind()
        return streams[-1], (*streams[:-1], *outputs)
