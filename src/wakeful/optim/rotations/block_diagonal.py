"""Small uniformly random rotations side by side: cheap, but no coordinate leaves its block."""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.optim.rotations.base import Rotation
from wakeful.parts.orthoadam import haar_matrix


class BlockDiagonal(Rotation):
    """Q = diag(Q_1, …, Q_k), each Q_i from the Haar measure; k = ⌈n / size⌉.

    Where `size` does not divide n the blocks' widths differ by at most one, so that no coordinate
    is left alone in a block of its own. O(n · size) a row.
    """

    name = "block_diagonal"
    examples = ("block_diagonal", "block_diagonal(size=16)")

    def __init__(self, *, size: int = 64) -> None:
        if size < 1:
            raise WakefulError(
                f"size of the block_diagonal rotation must be at least 1, got {size}"
            )
        self.size = size

    def draw(
        self, width: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype
    ) -> None:
        """Draw a Haar matrix for each block; blocks are at most `size` wide, and as equally wide as
        they can be.

        The blocks that are wider by one come first, and `split` is the number of their columns.
        `blocks` has two stacks of matrices, the wider ones and the others, or one if all are equal.
        """
        num_blocks = math.ceil(width / self.size)
        narrow_width, num_wider = divmod(width, num_blocks)
        wide_width, num_narrow = narrow_width + 1, num_blocks - num_wider
        self.split = num_wider * wide_width
        self.blocks = tuple(
            torch.stack([haar_matrix(n, generator) for _ in range(number)]).to(device, dtype)
            for n, number in ((wide_width, num_wider), (narrow_width, num_narrow))
            if number > 0
        )

    def into(self, grad: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return self._apply(grad, transpose=True)

    def back(self, step: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return self._apply(step, transpose=False)

    def _apply(self, rows: Float[Tensor, "R n"], *, transpose: bool) -> Float[Tensor, "R n"]:
        """Return the rows with every block of columns multiplied by its matrix, or by the matrix's
        transpose.
        """
        # The columns of the wider blocks, then those of the others, as in `self.blocks`.
        parts = (rows[:, : self.split], rows[:, self.split :]) if self.split else (rows,)
        rotated: list[Tensor] = []
        for part, blocks in zip(parts, self.blocks, strict=True):
            number, size, _ = blocks.shape
            by_block = part.reshape(-1, number, size).transpose(0, 1)
            product = torch.bmm(by_block, blocks.mT if transpose else blocks)
            rotated.append(product.transpose(0, 1).reshape(-1, number * size))
        return rotated[0] if len(rotated) == 1 else torch.cat(rotated, dim=-1)
