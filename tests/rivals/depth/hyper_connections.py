"""Hyper-connections: several streams side by side."""

import torch
from torch import Tensor, nn

from wakeful.depth import State, SublayerMix
from wakeful.shape import Shape


class HyperConnections(SublayerMix):
    """h = Σ_i a_i H_i; H_i ← Σ_j R_ij H_j + b_i F(h); the final norm reads Σ_i H_i / n.

    The static form of arXiv 2409.19606, n streams that all begin as the embedding. a is 1/n, R the
    identity and b one at the start: the plain stream.
    """

    name = "hyper_connections"
    examples = ("hyper_connections", "hyper_connections(streams=3)")
    neutral = "hyper_connections"

    def __init__(self, *, streams: int = 2) -> None:
        super().__init__()
        self.streams = streams

    def attach(self, shape: Shape) -> None:
        super().attach(shape)
        n, sublayers = self.streams, 2 * shape.num_layers
        self.reading = nn.Parameter(torch.full((sublayers, n), 1 / n))
        self.keeping = nn.Parameter(torch.eye(n).repeat(sublayers, 1, 1))
        self.writing = nn.Parameter(torch.ones(sublayers, n))

    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        streams = x.expand(self.streams, *x.shape)
        return self._read(0, streams), (streams,)

    def step(self, number: int, x: Tensor, out: Tensor, state: State) -> tuple[Tensor, State]:
        (streams,) = state
        kept = torch.einsum("ij,jbld->ibld", self.keeping[number - 1].to(x.dtype), streams)
        written = torch.einsum("i,bld->ibld", self.writing[number - 1].to(x.dtype), out)
        streams = kept + written
        if number == 2 * self.num_layers:
            return streams.mean(0), ()
        return self._read(number, streams), (streams,)

    def _read(self, number: int, streams: Tensor) -> Tensor:
        return torch.einsum("i,ibld->bld", self.reading[number].to(streams.dtype), streams)
