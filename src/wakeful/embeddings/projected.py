"""Embedding projections: a square matrix after the table of tokens, and one before the head."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from wakeful.embeddings.base import Embedding
from wakeful.roles import READS, WRITES, Role
from wakeful.shape import Shape


class Projected(Embedding):
    """h_0 = R_1 e, logits = head(R_2 norm(h_N)), R (D, D) and orthogonal at the start.

    EmbProj of Outlier-Safe Pre-Training (Park et al. 2025, arXiv 2506.19697, section 3.3;
    `rotated_embed` of their code), used with Muon and norms of one scale: embeddings, which Adam
    trains, no longer decide which channels of the stream are large. The products with the table and
    the head are a plain decoder without tied embeddings.
    """

    examples = ("projected",)
    plainer = "plain"

    def attach(self, shape: Shape) -> None:
        super().attach(shape)
        self.first = nn.Linear(shape.width, shape.width, bias=False)
        self.last = nn.Linear(shape.width, shape.width, bias=False)

    def roles(self) -> Mapping[str, Role]:
        return {
            # A decoder is folded before it is quantized; elsewhere they stay as they are.
            "first.weight": replace(WRITES, start="orthogonal", quantized=False),
            "last.weight": replace(READS, start="orthogonal", quantized=False),
        }

    def into(self, x: Tensor) -> Tensor:
        return self.first(x)

    def out(self, x: Tensor) -> Tensor:
        return self.last(x)

    @torch.no_grad()
    def folded(self, table: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(table.dtype, torch.float32)
        first, last = self.first.weight.to(exact), self.last.weight.to(exact)
        return (table.to(exact) @ first.T).to(table.dtype), (head.to(exact) @ last).to(head.dtype)
