"""MUDD: queries, keys, values and the stream read weighted sums of all blocks' outputs."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.depth.base import DepthMix, State, SublayerMix
from wakeful.variants.roles import Role
from wakeful.variants.shape import Shape

_EPS = 1e-6
_WAYS = 4
"""Query, key, value and residual stream."""


class MUDD(SublayerMix):
    """x^c_n = Σ_{j≤n} (a^c_{n,j} + A^c_{n,j}) X_j for c = query, key, value and residual stream.

    MUDDFormer (Xiao et al. 2025, arXiv 2502.12170; github.com/Caiyun-AI/MUDDFormer). X_0 is the
    embedding, X_n the output of block n, and the weights are each token's own,

        A_n = W_2 gelu(W_1 RMSNorm(X_n)),

    as many hidden channels as weights (the authors' code has four times as many after the last
    block). After the last block there is the residual stream alone, which the final norm reads. a
    starts one-hot at j = n and W_2 at zero: the plain stream; W_1 with a deviation of 1/√D. Here
    one norm serves queries, keys and values, where the authors' models have three (`sepln`), and
    all feed-forward networks are of one width.
    """

    examples = ("mudd",)
    neutral = "mudd"

    def attach(self, shape: Shape) -> None:
        """Create the parameters of each block, and set them to the plain stream.

        After block n, a token's own weights of X_0 to X_n (the embedding and the blocks' outputs)
        are W_2 gelu(W_1 RMSNorm(X_n)), with W_1 in `into` and W_2 in `out`. To them a (`fixed`) is
        added, which all tokens share. There are n + 1 weights for each way: query, key, value and
        residual stream; after the last block the residual stream alone.
        """
        super().attach(shape)
        self.into, self.out, self.fixed = nn.ModuleDict(), nn.ParameterDict(), nn.ParameterDict()
        for n in range(1, shape.num_layers + 1):
            ways = _WAYS if n < shape.num_layers else 1
            num_weights = ways * (n + 1)
            self.into[str(n)] = nn.Linear(shape.width, num_weights, bias=False)
            nn.init.normal_(self.into[str(n)].get_parameter("weight"), std=shape.width**-0.5)
            self.out[str(n)] = nn.Parameter(torch.zeros(num_weights, num_weights))
            self.fixed[str(n)] = nn.Parameter(torch.zeros(ways, n + 1))
        self.start_plain()

    def roles(self) -> Mapping[str, Role]:
        reads = Role(residual=1, decays=True)
        return {f"into.{n}.weight": reads for n in range(1, self.num_layers + 1)}

    @torch.no_grad()
    def start_plain(self) -> str:
        """Set the weights that tokens share to 1 for the block's own output and 0 for earlier ones,
        and W_2, and with it each token's own weights, to zero. This is the plain stream; return "".
        """
        for n, fixed in self.fixed.items():
            fixed.zero_()[:, -1] = 1.0
            self.out[n].zero_()
        return ""

    @torch.no_grad()
    def take_over(self, reference: DepthMix, sources: Sequence[int]) -> None:
        """Copy the trained parameters of `reference` for the inherited blocks.

        Layer n was layer `sources[n]` there; −1 is a new layer, which keeps its parameters. So does
        a block that is the last in one of the two decoders only: the last has one way, the others
        four.

        Raises:
            WakefulError: the inherited layers are not the first ones here and there, in order.
        """
        num_inherited = self.first_layers(sources)
        trained = dict(reference.named_parameters())
        for name, parameter in self.named_parameters():
            block = int(name.split(".")[1])  # from 1
            if block <= num_inherited and trained[name].shape == parameter.shape:
                parameter.copy_(trained[name])

    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        """Return the embedding `x` as the first block's input, and the state (the inputs of its
        queries, keys and values, X_0), which are all `x`.
        """
        return x, (x, x, x, x)

    def step(self, number: int, x: Tensor, out: Tensor, state: State) -> tuple[Tensor, State]:
        """Add a sublayer's output `out` to the stream `x`; after block n's second sublayer, replace
        the stream by a weighted sum of X_0 to X_n. Return the stream and the state.

        The state is (the inputs of the next block's queries, keys and values, which are weighted
        sums too, X_0, …, X_n). After the last block it is empty.
        """
        x = x + out
        if number % 2:  # sublayers count from 1: after attention the block is not complete
            return x, state
        outputs = (*state[3:], x)  # X_0 to X_n
        *qkv, stream = self._mix_outputs(number // 2, outputs)
        new_state = (*qkv, *outputs) if qkv else ()  # no block reads the last block's state
        return stream, new_state

    def qkv_inputs(self, number: int, x: Tensor, state: State) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = state[:3]
        return query, key, value

    def _mix_outputs(self, block: int, outputs: State) -> list[Tensor]:
        """Return the weighted sums of X_0 to X_n (`outputs`) after block n: the inputs of queries,
        keys and values, and the residual stream; after the last block the stream alone.
        """
        n, last = str(block), outputs[-1]
        hidden = F.gelu(self.into[n](F.rms_norm(last, last.shape[-1:], eps=_EPS)))
        token_weights = F.linear(hidden, self.out[n].to(hidden.dtype)).to(last.dtype)
        # (B, L, ways, n + 1): the token's own weights and those that all tokens share.
        weights = token_weights.unflatten(-1, (-1, len(outputs))) + self.fixed[n].to(last.dtype)
        return [weighted(way.movedim(-1, 0), outputs) for way in weights.unbind(-2)]


def weighted(shares: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    """Return Σ_j p_j v_j (B, L, D), given the `shares` p (J, B, L) and J `outputs` v (B, L, D)."""
    first, *rest = shares.unsqueeze(-1)
    mixed = first * outputs[0]
    for share, v in zip(rest, outputs[1:], strict=True):
        mixed = torch.addcmul(mixed, share, v)
    return mixed
