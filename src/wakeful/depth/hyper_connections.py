"""Hyper-connections: several residual streams side by side."""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.depth.base import State, SublayerMix
from wakeful.errors import WakefulError
from wakeful.variants.roles import Role
from wakeful.variants.shape import Shape


class HyperConnections(SublayerMix):
    """h = Σ_i A_i0 H_i; H_j ← Σ_i A_ij H_i + B_j F(h), F the sublayer, over n = `streams` streams.

    Zhu et al. 2024 (arXiv 2409.19606, eqs. 1–5 and 10–14, algorithm 2). All streams begin as the
    embedding. Sublayer s, counted from 0, starts with A_i0 one-hot at i = s mod n, A_ij the
    identity and B = 1: the plain stream. With `dynamic` the token adds to both,

        A_ij + s_A tanh(LayerNorm(H_i) W)_j,    B_i + s_B tanh(LayerNorm(H_i) W')_i,

    W = W' = 0 and s = 0.01 at the start. LayerNorm has no scale or bias here. The final norm reads
    the streams' mean, where the paper has their sum: a norm sees no difference but in its ε. For
    that sum it scales initial weights by √n (section 4); the mean starts as the plain stream does,
    so they stay as they are.
    """

    name = "hyper_connections"
    examples = ("hyper_connections", "hyper_connections(streams=3, dynamic=False)")
    neutral = "hyper_connections"

    def __init__(self, *, streams: int = 4, dynamic: bool = True) -> None:
        super().__init__()
        if streams < 1:
            raise WakefulError(f"hyper_connections: streams must be at least 1, got {streams}")
        self.streams = streams
        self.dynamic = dynamic

    def attach(self, shape: Shape) -> None:
        """Create each sublayer's weights: `width`, A (n, n + 1), of the streams in its input and in
        the new streams; `depth`, B (n), of its output in these; and if `dynamic`, [W W'] (`maps`)
        and [s_A s_B] (`scales`), which make what a token adds to both.
        """
        super().attach(shape)
        n, sublayers = self.streams, range(2 * shape.num_layers)
        self.width = nn.ParameterList(torch.zeros(n, n + 1) for _ in sublayers)
        self.depth = nn.ParameterList(torch.zeros(n) for _ in sublayers)
        if self.dynamic:
            self.maps = nn.ModuleList(nn.Linear(shape.width, n + 2, bias=False) for _ in sublayers)
            self.scales = nn.ParameterList(torch.zeros(2) for _ in sublayers)
        self.start_plain()

    def roles(self) -> Mapping[str, Role]:
        reads = Role(residual=1, decays=True)
        return {f"maps.{sublayer}.weight": reads for sublayer in range(2 * self.num_layers)}

    @torch.no_grad()
    def start_plain(self) -> str:
        """Set all parameters to the start that the class describes, which is the plain stream."""
        for sublayer, (width, depth) in enumerate(zip(self.width, self.depth, strict=True)):
            # Column 0 is A_i0, of the sublayer's input; the others are A_ij, of the new streams.
            width.zero_()[:, 1:].fill_diagonal_(1.0)
            width[sublayer % self.streams, 0] = 1.0
            depth.fill_(1.0)
            if self.dynamic:
                self.maps[sublayer].get_parameter("weight").zero_()
                self.scales[sublayer].fill_(0.01)
        return ""

    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        return self._read(0, x.expand(self.streams, *x.shape))

    def step(self, number: int, x: Tensor, out: Tensor, state: State) -> tuple[Tensor, State]:
        """Add the output to the streams, and return the next sublayer's input; after the last
        sublayer the streams' mean.
        """
        mixed, depth = state
        streams = torch.addcmul(mixed, depth.unsqueeze(-1), out)
        if number == 2 * self.num_layers:
            return streams.mean(0), ()
        return self._read(number, streams)

    def _read(self, sublayer: int, streams: Tensor) -> tuple[Tensor, State]:
        """Return the input (B, L, D) of a sublayer, from 0, that the streams (n, B, L, D) give, and
        the state for writing its output back: the mixed streams (n, B, L, D), and the weights
        (n, B, L) with which the output is added to them.
        """
        width = self.width[sublayer].to(streams.dtype)[:, None, None]
        depth = self.depth[sublayer].to(streams.dtype)[:, None, None]
        if self.dynamic:
            normed = F.layer_norm(streams, streams.shape[-1:])
            added = self.maps[sublayer](normed).tanh().to(streams.dtype)
            scale = self.scales[sublayer].to(streams.dtype)
            width = width + scale[0] * added[..., :-1]
            depth = depth + scale[1] * added[..., -1]
        mixed = [
            (width[..., column].unsqueeze(-1) * streams).sum(0)
            for column in range(self.streams + 1)
        ]
        return mixed[0], (torch.stack(mixed[1:]), depth)
