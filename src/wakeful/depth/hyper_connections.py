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
        """Store the number of streams, and whether tokens change the weights (`dynamic`).

        Raises:
            WakefulError: there is no stream.
        """
        super().__init__()
        if streams < 1:
            raise WakefulError(f"hyper_connections: streams must be at least 1, got {streams}")
        self.streams = streams
        self.dynamic = dynamic

    def attach(self, shape: Shape) -> None:
        """Create the parameters of each sublayer, and set them to the plain stream.

        With n streams, `width` is the matrix A (n, n + 1): column 0 mixes the streams into the
        sublayer's input, and the other columns mix them into the new streams. `depth` is B (n), the
        weights with which the sublayer's output is added to the new streams.

        If `dynamic`, each token adds s_A tanh(LayerNorm(H) W) to A, for its streams H, and
        s_B tanh(LayerNorm(H) W') to B: `maps` are [W W'], and `scales` [s_A s_B].
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
        """Set the parameters so that the streams' mean is the plain residual stream, and return "".

        Each sublayer reads one stream, its output is added to all of them, and tokens add nothing.
        """
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
        """Return the first sublayer's input and the state; all streams are the embedding `x`."""
        return self._read(0, x.expand(self.streams, *x.shape))

    def step(self, number: int, x: Tensor, out: Tensor, state: State) -> tuple[Tensor, State]:
        """Add a sublayer's output `out` to the streams; return the next sublayer's input and state,
        or, after the last sublayer, the mean of the streams and an empty state.
        """
        mixed, depth = state  # the mixed streams, and B as in `_read`
        streams = torch.addcmul(mixed, depth.unsqueeze(-1), out)
        if number == 2 * self.num_layers:
            return streams.mean(0), ()
        return self._read(number, streams)  # `number` counts from 1, `_read` from 0: the next one

    def _read(self, sublayer: int, streams: Tensor) -> tuple[Tensor, State]:
        """Return a sublayer's input (B, L, D), made of the streams (n, B, L, D), and the state that
        `step` will need. Sublayers count from 0.

        The state is (the mixed streams (n, B, L, D), the weights (n, B, L) with which the
        sublayer's output is to be added to them). Without `dynamic` the weights are (n, 1, 1).
        """
        width = self.width[sublayer].to(streams.dtype)[:, None, None]
        depth = self.depth[sublayer].to(streams.dtype)[:, None, None]
        if self.dynamic:
            normed = F.layer_norm(streams, streams.shape[-1:])
            added = self.maps[sublayer](normed).tanh().to(streams.dtype)
            scale = self.scales[sublayer].to(streams.dtype)
            width = width + scale[0] * added[..., :-1]
            depth = depth + scale[1] * added[..., -1]
        # Column by column: a sum over streams with the weights A_ij.
        sublayer_input, *new_streams = [
            (width[..., column].unsqueeze(-1) * streams).sum(0)
            for column in range(self.streams + 1)
        ]
        return sublayer_input, (torch.stack(new_streams), depth)
