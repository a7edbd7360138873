"""What an embedding owes: the way from the table of tokens to the stream, and to the head."""

from typing import ClassVar

from torch import Tensor, nn

from wakeful.shape import Shape
from wakeful.variants import Variant


class Embedding(Variant, nn.Module):
    """h_0 = into(e) of a token's row e of the table, and logits = head(out(norm(h_N)))."""

    plainer: ClassVar[str] = ""
    """The expression of a simpler one that is the same function with the `folded` matrices."""

    def __init__(self) -> None:
        super().__init__()

    def attach(self, shape: Shape) -> None:
        """Make the parameters for a decoder of this shape."""

    def into(self, x: Tensor) -> Tensor:
        """Return what enters the stream (B, L, D), given the tokens' rows (B, L, D)."""
        return x

    def out(self, x: Tensor) -> Tensor:
        """Return what the head reads (B, L, D), given the final norm's output (B, L, D)."""
        return x

    def folded(self, table: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """Return the table and the head (V, D) with which the `plainer` one does what this does."""
        return table, head


class Plain(Embedding):
    """h_0 = e, logits = head(norm(h_N)): the vanilla Transformer."""

    examples = ("plain",)
    neutral = "plain"
