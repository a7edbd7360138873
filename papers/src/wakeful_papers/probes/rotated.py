"""Hidden states after a random rotation."""

import torch
from torch import Tensor

from wakeful.parts.orthoadam import haar_matrix
from wakeful.probes.base import HiddenEvent, MeanProbe
from wakeful.probes.hidden import put_kurtosis_and_norm_ratio


class RotatedShape(MeanProbe):
    """`kurtosis` and `norm_ratio` of hidden states after a random rotation, variant `rotated` (From
    Attention to Activation, section 4 and figure 3).

    Q is drawn from the Haar measure by `seed`, one per width. A state carried by one channel has a
    kurtosis near 3 after it, and a norm ratio near (2 ln D) / D.
    """

    def __init__(self, *, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self._rotations: dict[int, Tensor] = {}

    def see_hidden(self, event: HiddenEvent) -> None:
        for h in event.sequences:
            turned = h @ self._rotation(h.shape[-1]).to(h)
            put_kurtosis_and_norm_ratio(self, event.layer, turned, variant="rotated")

    def _rotation(self, width: int) -> Tensor:
        if width not in self._rotations:
            generator = torch.Generator().manual_seed(self.seed)
            self._rotations[width] = haar_matrix(width, generator)
        return self._rotations[width]
