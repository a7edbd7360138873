"""Embeddings: maps from the table of tokens to the stream, and from the final norm to the head."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from wakeful.variants import Variant
from wakeful.variants.roles import READS, WRITES, Role
from wakeful.variants.shape import Shape

__all__ = ["Embedding", "Plain", "Projected", "Scaled"]


class Embedding(Variant, nn.Module):
    """h_0 = into(e), e the table's row for a token, and logits = head(out(norm(h_N)))."""

    folded_name: ClassVar[str] = ""
    """The expression of a simpler embedding that computes the same function with the matrices that
    `folded` returns; "" if there is none."""

    def __init__(self) -> None:
        super().__init__()

    def attach(self, shape: Shape) -> None:
        """Create the parameters for a decoder of this shape."""

    def into(self, x: Tensor) -> Tensor:
        """Return the stream's first states (B, L, D), given the tokens' embeddings (B, L, D)."""
        return x

    def out(self, x: Tensor) -> Tensor:
        """Return the head's input (B, L, D), given the final norm's output (B, L, D)."""
        return x

    def folded(self, table: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """Return another (table, head), each (V, D): with these, the simpler embedding
        `folded_name` computes the same function as this one with the given `table` and `head`.
        """
        return table, head


class Plain(Embedding):
    """h_0 = e, logits = head(norm(h_N)): the vanilla Transformer."""

    examples = ("plain",)
    neutral = "plain"


class Projected(Embedding):
    """h_0 = R_1 e, logits = head(R_2 norm(h_N)), R (D, D) and orthogonal at the start.

    EmbProj of Outlier-Safe Pre-Training (Park et al. 2025, arXiv 2506.19697, section 3.3;
    `rotated_embed` of their code), used with Muon and norms of one scale: embeddings, which Adam
    trains, no longer decide which channels of the stream are large. The products with the table and
    the head are a plain decoder without tied embeddings.
    """

    examples = ("projected",)
    folded_name = "plain"

    def attach(self, shape: Shape) -> None:
        self.first = nn.Linear(shape.width, shape.width, bias=False)
        self.last = nn.Linear(shape.width, shape.width, bias=False)

    def roles(self) -> Mapping[str, Role]:
        return {
            # Not quantized: usually, they are folded into the table and the head before.
            "first.weight": replace(WRITES, start="orthogonal", quantized=False),
            "last.weight": replace(READS, start="orthogonal", quantized=False),
        }

    def into(self, x: Tensor) -> Tensor:
        return self.first(x)

    def out(self, x: Tensor) -> Tensor:
        return self.last(x)

    @torch.no_grad()
    def folded(self, table: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        """Return the table times R_1ᵀ and the head times R_2, where R_1 and R_2 are the weights of
        `first` and `last`: with these, the plain embedding computes the same function. The products
        are taken in at least float32, and have the types of `table` and `head`.
        """
        wide = torch.promote_types(table.dtype, torch.float32)
        first, last = self.first.weight.to(wide), self.last.weight.to(wide)
        return (table.to(wide) @ first.T).to(table.dtype), (head.to(wide) @ last).to(head.dtype)


class Scaled(Embedding):
    """h_0 = √D e, logits = head(norm(h_N)): Gemma's, after Vaswani et al. 2017 (section 3.4).

    √D is rounded to the embeddings' precision, as Gemma does it.
    """

    examples = ("scaled",)

    def into(self, x: Tensor) -> Tensor:
        return x * x.new_tensor(math.sqrt(x.shape[-1]))
