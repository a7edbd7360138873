"""x_0 lambdas: each block reads a weighted sum of the stream and the embedding."""

import torch
from torch import Tensor, nn

from wakeful.depth import State, SublayerMix
from wakeful.shape import Shape


class StreamLambdas(SublayerMix):
    """h ← a_n h + b_n h_0 before block n, a = 1 and b = 0 at the start (nanochat)."""

    name = "stream_lambdas"
    examples = ("stream_lambdas",)
    neutral = "stream_lambdas"

    def attach(self, shape: Shape) -> None:
        super().attach(shape)
        self.a = nn.Parameter(torch.ones(shape.num_layers))
        self.b = nn.Parameter(torch.zeros(shape.num_layers))

    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        return self._mixed(0, x, x), (x,)

    def step(self, number: int, x: Tensor, out: Tensor, state: State) -> tuple[Tensor, State]:
        x = x + out
        if number % 2 or number == 2 * self.num_layers:
            return x, state
        return self._mixed(number // 2, x, state[0]), state

    def _mixed(self, block: int, x: Tensor, embedded: Tensor) -> Tensor:
        return self.a[block].to(x.dtype) * x + self.b[block].to(x.dtype) * embedded
