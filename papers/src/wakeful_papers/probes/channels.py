"""Outlier channels: their agreement between texts, and channels of large weights."""

import torch
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.probes.base import Frame, HiddenEvent, MeanProbe, exact_rows, first_and_rest
from wakeful_papers.probes.sums import SumProbe


class ChannelOverlap(SumProbe):
    """`outlier_channel_overlap`: of a sequence's channels with the largest activations, the share
    that are so in another sequence too (From Attention to Activation, section 2.2: outliers are
    "invariant to the input sequence").

    The mean over pairs s ≠ t of |T_k(s) ∩ T_k(t)| / k for each block output, T_k the k of D
    channels with the largest mean of |x_i| over a sequence's tokens, the first or the rest. 1: the
    same channels in all; channels drawn at random share k / D. One sequence alone has no value.

    Raises:
        WakefulError: k is below 1, or above the width of the hidden states.
    """

    def __init__(self, *, channels: int = 4) -> None:
        if channels < 1:
            raise WakefulError(f"channels = {channels} must be at least 1")
        super().__init__()
        self.channels = channels

    def see_hidden(self, event: HiddenEvent) -> None:
        """Count for each channel whether it is among the sequence's largest."""
        for h in event.sequences if event.layer >= 0 else ():
            if self.channels > h.shape[-1]:
                raise WakefulError(
                    f"channels = {self.channels} is above the model's width, {h.shape[-1]}"
                )
            for position, part in first_and_rest(h):
                is_top = torch.zeros(h.shape[-1])
                is_top[part.abs().mean(0).topk(self.channels).indices.cpu()] = 1
                self.add((event.layer, position), is_top)

    def rows(self) -> Frame:
        """Return the mean share of largest channels that two sequences have in common."""
        rows = []
        for (layer, position), (times_top, sequences) in sorted(self.sums.items()):
            pairs = float(sequences * (sequences - 1))
            if pairs:
                shared = float((times_top * (times_top - 1)).sum()) / (self.channels * pairs)
                rows.append((layer, None, position, "outlier_channel_overlap", "paper", shared))
        return exact_rows(rows)


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
        """Find each layer's channels with the largest output weights up to it."""
        super().__init__()
        width = decoder.config.width
        if not 1 <= channels <= width:
            raise WakefulError(f"channels = {channels} must be between 1 and the width, {width}")
        self.channels = channels
        largest = torch.zeros(width)
        self._largest: list[set[int]] = []
        for block in decoder.blocks:
            for weight in (block.attention.out.weight, block.mlp.down.weight):
                rows = weight.detach().float().abs().amax(1).cpu()
                largest = torch.maximum(largest, rows)
            self._largest.append(self._top(largest))

    def see_hidden(self, event: HiddenEvent) -> None:
        """Add the share of largest channels that also have the largest weights."""
        for h in event.sequences if event.layer >= 0 else ():
            for position, part in first_and_rest(h):
                shared = self._top(part.abs().mean(0)) & self._largest[event.layer]
                share = len(shared) / self.channels
                self.put(event.layer, "outlier_weight_share", share, position=position)

    def _top(self, sizes: Tensor) -> set[int]:
        return set(sizes.topk(self.channels).indices.tolist())
