"""Attention residuals: a sublayer reads a softmax-weighted sum of earlier sublayers' outputs."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from wakeful.depth.base import DepthMix, State, SublayerMix
from wakeful.errors import WakefulError
from wakeful.variants.roles import Role
from wakeful.variants.shape import Shape

_EPS = 1e-6


class AttentionResiduals(SublayerMix):
    """h_s = Σ_j p_j v_j, p = softmax_j(w_s · RMSNorm(v_j)), w_s = 0 at the start.

    Attention Residuals (Kimi Team 2026, arXiv 2603.15031, section 3 and figure 2). v_0 is the
    embedding and v_j the output of sublayer j; the final norm reads such a sum as well. With
    `layers` the outputs of that many layers are summed as usual and count as one v (Block AttnRes),
    the block that is not complete yet among them. RMSNorm has no scale here, which w could take
    over.
    """

    name = "attention_residuals"
    examples = ("attention_residuals", "attention_residuals(layers=3)")

    def __init__(self, *, layers: int = 0) -> None:
        super().__init__()
        if layers < 0:
            raise WakefulError(f"attention_residuals: layers must not be negative, got {layers}")
        self.layers = layers

    def attach(self, shape: Shape) -> None:
        """Create a query vector w = 0 for each reader: sublayers from 2 (the first reads the
        embedding alone) to 2N, and the final norm, 2N + 1.
        """
        super().attach(shape)
        self.queries = nn.ParameterDict(
            {
                str(reader): nn.Parameter(torch.zeros(shape.width))
                for reader in range(2, 2 * shape.num_layers + 2)
            }
        )

    def roles(self) -> Mapping[str, Role]:
        return {f"queries.{reader}": Role(residual=0) for reader in self.queries}

    @torch.no_grad()
    def take_over(self, reference: DepthMix, sources: Sequence[int]) -> None:
        """Copy parameters, named `kind.reader`, from the readers that these were in the reference:
        those of layer `sources[n]` for layer n, and the final norm.
        """
        parameters = dict(reference.named_parameters())
        final_norm, reference_final_norm = 2 * len(sources) + 1, 2 * reference.num_layers + 1
        source_of = {final_norm: reference_final_norm}
        for layer, source in enumerate(sources):
            if source >= 0:  # its attention is reader 2 · layer + 1, its MLP the next
                source_of[2 * layer + 1] = 2 * source + 1
                source_of[2 * layer + 2] = 2 * source + 2
        for name, parameter in self.named_parameters():
            kind, reader = name.split(".")
            source_name = f"{kind}.{source_of.get(int(reader))}"
            if source_name in parameters:
                parameter.copy_(parameters[source_name])

    def begin(self, x: Tensor) -> tuple[Tensor, State]:
        return x, (x,)

    def step(self, number: int, x: Tensor, out: Tensor, state: State) -> tuple[Tensor, State]:
        """Append the output to the state, which holds the embedding and all outputs so far; return
        their softmax-weighted sum, the next input, and the state.
        """
        if self.layers and (number - 1) % (2 * self.layers):  # outputs of a block of layers add up
            state = (*state[:-1], state[-1] + out)
        else:
            state = (*state, out)
        return weighted(self.logits(number + 1, state).softmax(0), state), state

    def logits(self, reader: int, outputs: Sequence[Tensor]) -> Tensor:
        """Return w · RMSNorm(v_j) (J, B, L) of a reader (from 1) for J earlier outputs v_j."""
        query = self.queries[str(reader)]  # as RMSNorm's weight: the sum is the dot product
        return torch.stack(
            [F.rms_norm(v, v.shape[-1:], query.to(v.dtype), _EPS).sum(-1) for v in outputs]
        )


def weighted(shares: Tensor, outputs: Sequence[Tensor]) -> Tensor:
    """Return Σ_j p_j v_j (B, L, D) of shares p (J, B, L) and J outputs v (B, L, D)."""
    first, *rest = shares.unsqueeze(-1)
    mixed = first * outputs[0]
    for share, v in zip(rest, outputs[1:], strict=True):
        mixed = torch.addcmul(mixed, share, v)
    return mixed
