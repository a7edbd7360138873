"""What a block does to the residual stream: how many blocks could go."""

import torch
from torch import Tensor

from wakeful.probes import exact
from wakeful.probes.base import Event, HiddenEvent, MeanProbe


class BlockInfluence(MeanProbe):
    """`block_influence`, 1 − mean cos(x_in, x_out) (ShortGPT), and `angular_distance`,
    arccos(cos(x_in, x_out)) / π: variant `paper` at the last token, `all_tokens` their mean.

    The row of layer n is about block n.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before: tuple[int, list[Tensor]] = (-2, [])

    def see(self, event: Event) -> None:
        if not isinstance(event, HiddenEvent):
            return
        layer, before = self.before
        after = event.sequences
        self.before = (event.layer, after)
        if layer != event.layer - 1 or event.layer < 0:
            return
        for x_in, x_out in zip(before, after, strict=True):
            self.put(event.layer, "block_influence", exact.block_influence(x_in, x_out))
            last = exact.angular_distance(x_in, x_out)
            self.put(event.layer, "angular_distance", last, position="last")
            cosine = torch.nn.functional.cosine_similarity(x_in, x_out, dim=-1)
            angle = cosine.clamp(-1, 1).arccos().mean() / torch.pi
            self.put(event.layer, "angular_distance", angle, variant="all_tokens")
