"""Whether a model's largest weights write into the channels where its outliers are."""

import torch
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.model.block import Block
from wakeful.model.decoder import Decoder
from wakeful.probes.base import HiddenEvent, MeanProbe, first_and_rest


class LargestWeights(MeanProbe):
    """`outlier_weight_share`: of the channels with the largest activations, the share that are also
    among those with the largest weights (From Attention to Activation, section 4).

    |T_k(a) ∩ T_k(w)| / k for each block output x of n, T_k the k largest of D channels: a_i is the
    mean of |x_i| over a sequence's tokens, the first or the rest, and w_i = max_{m ≤ n, j}
    max(|O_m,ij|, |W_m,ij|) over the output projections O of attention and W of the MLP, (D out, in)
    each, that have written into the stream by then. Channels drawn at random share k / D.

    Raises:
        WakefulError: k is not between 1 and the model's width.
    """

    def __init__(self, decoder: Decoder, *, channels: int = 4) -> None:
        super().__init__()
        width = decoder.config.width
        if not 1 <= channels <= width:
            raise WakefulError(f"channels = {channels} must be between 1 and the width, {width}")
        self.channels = channels
        largest = torch.zeros(width)
        self._largest: list[set[int]] = []
        for block in decoder.blocks:
            assert isinstance(block, Block)
            for weight in (block.attention.out.weight, block.mlp.down.weight):
                rows = weight.detach().float().abs().amax(1).cpu()
                largest = torch.maximum(largest, rows)
            self._largest.append(self._top(largest))

    def see_hidden(self, event: HiddenEvent) -> None:
        for h in event.sequences if event.layer >= 0 else ():
            for position, part in first_and_rest(h):
                both = self._top(part.abs().mean(0)) & self._largest[event.layer]
                share = len(both) / self.channels
                self.put(event.layer, "outlier_weight_share", share, position=position)

    def _top(self, sizes: Tensor) -> set[int]:
        return set(sizes.topk(self.channels).indices.tolist())
