"""Small uniformly random rotations side by side: cheap, but no coordinate leaves its block."""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.optim.rotations.base import Rotation, haar_matrix


class BlockDiagonal(Rotation):
    """Q = diag(Q_1, …, Q_k), each Q_i from the Haar measure; k = ⌈n / block⌉.

    Where n is no multiple of ``block`` (default 64) the block widths differ by at most one, so that
    no coordinate is left alone in a block of its own. O(n · block) a row.
    """

    def __init__(
        self,
        width: int,
        *,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        block: int = 64,
    ) -> None:
        if block < 1:
            raise WakefulError(f"block={block} of the block_diagonal rotation must be at least 1")
        count = -(-width // block)
        narrow, wider = divmod(width, count)
        self.split = wider * (narrow + 1)
        self.blocks = tuple(
            torch.stack([haar_matrix(size, generator) for _ in range(number)]).to(device, dtype)
            for size, number in ((narrow + 1, wider), (narrow, count - wider))
            if number > 0
        )

    def into(self, grad: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return self._apply(grad, transpose=True)

    def back(self, step: Float[Tensor, "R n"]) -> Float[Tensor, "R n"]:
        return self._apply(step, transpose=False)

    def _apply(self, rows: Float[Tensor, "R n"], *, transpose: bool) -> Float[Tensor, "R n"]:
        parts = (rows[:, : self.split], rows[:, self.split :]) if self.split else (rows,)
        turned: list[Tensor] = []
        for part, blocks in zip(parts, self.blocks, strict=True):
            number, size, _ = blocks.shape
            by_block = part.reshape(-1, number, size).transpose(0, 1)
            product = torch.bmm(by_block, blocks.mT if transpose else blocks)
            turned.append(product.transpose(0, 1).reshape(-1, number * size))
        return turned[0] if len(turned) == 1 else torch.cat(turned, dim=-1)

    @staticmethod
    def memory(width: int, itemsize: int, options: Mapping[str, int | float]) -> int:
        return int(width * min(width, options.get("block", 64)) * itemsize)
