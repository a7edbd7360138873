"""What a block receives from the residual stream."""

from abc import ABC, abstractmethod
from collections.abc import Mapping

from torch import Tensor, nn

from wakeful.shape import Shape
from wakeful.variants import Variant


class DepthMix(Variant, nn.Module, ABC):
    """The stream x_n after block n, made of the embedding X_0 and the blocks' outputs X_1 … X_n.

    Hiddens are numbered as in the formulas: 0 is the embedding, n the output of the n-th block.
    """

    def __init__(self) -> None:
        super().__init__()

    def attach(self, shape: Shape) -> None:
        """Make the parameters for a decoder of this shape."""
        self.num_layers = shape.num_layers

    def reads(self, number: int) -> frozenset[int]:
        """Return the earlier hiddens needed after block `number` (its own output left out)."""
        return frozenset()

    @abstractmethod
    def forward(self, number: int, x: Tensor, hiddens: Mapping[int, Tensor]) -> Tensor:
        """Return the stream (B, L, D) that follows block `number`, whose plain output is `x`."""
