"""One layer of the decoder."""

from torch import Tensor, nn

from wakeful.model.attention import Attention
from wakeful.model.flow import Flow
from wakeful.routes.base import Read


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): the pre-norm Transformer block."""

    def __init__(
        self, attention_norm: nn.Module, attention: Attention, mlp_norm: nn.Module, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp

    def forward(self, x: Tensor, flow: Flow) -> tuple[Tensor, dict[Read, Tensor]]:
        """Return the block's output (B, L, D) and what later layers will read of it."""
        attended, left = self.attention(self.attention_norm(x), flow)
        x = x + attended
        return x + self.mlp(self.mlp_norm(x)), left


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(norm'(x)): both halves read the block's input (GPT-NeoX)."""

    def forward(self, x: Tensor, flow: Flow) -> tuple[Tensor, dict[Read, Tensor]]:
        attended, left = self.attention(self.attention_norm(x), flow)
        return x + attended + self.mlp(self.mlp_norm(x)), left
