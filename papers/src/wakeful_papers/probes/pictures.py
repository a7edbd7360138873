"""Pictures: attention weights and hidden magnitudes, pooled to a size that can be viewed.

Shapes: S picture size (bins), L tokens, D model width.
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.probes.base import AttentionEvent, Frame, HiddenEvent, exact_rows
from wakeful.probes.streaming import AttentionInputs, head_weights, tiles
from wakeful_papers.probes.sums import SumProbe


class AttentionPictures(SumProbe):
    """`attention_picture`: the weights of chosen layers and heads (None: of all), S × S: lower
    triangles.

    A pixel is the attention its queries (rows) give its keys, in sum over the keys and mean over
    the queries, so a row sums to what the weights do. Sequences are averaged; row and column bins
    are fractions of each sequence. `position` is "row,column".

    Raises:
        WakefulError: sequences of several lengths, some of them shorter than `size`.
    """

    def __init__(
        self,
        *,
        layers: Collection[int] | None = None,
        heads: Collection[int] | None = None,
        size: int = 64,
    ) -> None:
        super().__init__()
        self.layers = None if layers is None else set(layers)
        self.heads = None if heads is None else set(heads)
        self.size = size

    def see_attention(self, event: AttentionEvent) -> None:
        """Add a picture of the chosen heads' attention, pooled to `size`."""
        if self.layers is not None and event.layer not in self.layers:
            return
        for sequence in event.sequences:
            for head in range(sequence.num_heads):
                if self.heads is not None and head not in self.heads:
                    continue
                key = event.layer, head
                picture = attention_picture(sequence, head, self.size)
                previous, _ = self.sums.get(key, (picture, 0))
                if previous.shape != picture.shape:
                    raise WakefulError(
                        f"pictures of {len(previous)} and of {len(picture)} tokens have no "
                        "mean: give AttentionPictures a size up to the shortest sequence"
                    )
                self.add(key, picture)

    def pictures(self) -> dict[tuple[Any, ...], Float[Tensor, "S S"]]:
        """Return the picture of each (layer, head)."""
        return {key: total / count for key, (total, count) in self.sums.items()}

    def rows(self) -> Frame:
        return exact_rows(
            (layer, head, pixel, "attention_picture", "paper", value)
            for (layer, head), picture in sorted(self.pictures().items())
            for pixel, value in _pixels(picture)
        )


def _pixels(picture: Tensor, *, causal: bool = True) -> Iterator[tuple[str, float]]:
    """Yield ("row,column", value) of a picture; of a causal one, no zeros above the diagonal."""
    for i, line in enumerate(picture.tolist()):
        for j, value in enumerate(line):
            if not causal or j <= i or value > 0:
                yield f"{i},{j}", value


def attention_picture(heads: AttentionInputs, head: int, size: int) -> Float[Tensor, "S S"]:
    """Return one head's weights pooled to size × size bins (L × L where L is smaller).

    A pixel is a sum over its bin's keys and a mean over its bin's queries.
    """
    length = heads.length
    size = min(size, length)
    bins = torch.arange(length, device=heads.q.device) * size // length
    picture = torch.zeros(size, size, dtype=torch.float64, device=heads.q.device)
    for tile in tiles(heads, range(head, head + 1)):
        weights = tile.weights[0].double()
        by_key = weights.new_zeros(len(weights), size)
        by_key.index_add_(1, bins[tile.first_key : tile.end_key], weights)
        picture.index_add_(0, bins[tile.first_query : tile.end_query], by_key)
    return (picture / bins.bincount(minlength=size).unsqueeze(1)).cpu()


class MeanAttention(SumProbe):
    """`mean_attention`: the weights among the first `tokens` positions, averaged over all heads of
    all layers and all sequences (From Attention to Activation, figure 1a). A dominant first token
    is a bright first column. `position` is "query,key".
    """

    def __init__(self, *, tokens: int = 48) -> None:
        super().__init__()
        self.tokens = tokens

    def see_attention(self, event: AttentionEvent) -> None:
        """Add all heads' attention among the first tokens to one mean.

        A shorter sequence's weights are padded with zeros, which do not count in the mean.
        """
        for sequence in event.sequences:
            size = min(self.tokens, sequence.length)
            padding = self.tokens - size
            counted_rows = F.pad(torch.ones(size, 1), (0, 0, 0, padding))
            for head in range(sequence.num_heads):
                weights = F.pad(head_weights(sequence, head, size), (0, padding, 0, padding))
                self.add((), weights, counted_rows)

    def picture(self) -> Float[Tensor, "tokens tokens"]:
        """Return the mean weights (query, key); positions that no sequence has are left out."""
        total, counts = self.sums[()]
        covered = int((counts > 0).sum())
        return total[:covered, :covered] / counts[:covered]

    def rows(self) -> Frame:
        return exact_rows(
            (None, None, pixel, "mean_attention", "paper", value)
            for pixel, value in (_pixels(self.picture()) if self.sums else ())
        )


class HiddenPicture(SumProbe):
    """`hidden_picture`: mean |x| over block outputs and sequences, the first `tokens` positions by
    channel bins (From Attention to Activation, figure 1b). A bin has the value of its largest
    channel, since an outlier is in a single one. `position` is "token,bin".
    """

    def __init__(self, *, tokens: int = 64, bins: int = 256) -> None:
        super().__init__()
        self.tokens, self.bins = tokens, bins

    def see_hidden(self, event: HiddenEvent) -> None:
        """Add |x| of the first tokens. A shorter sequence is padded with zeros, which do not count
        in the mean.
        """
        if event.layer < 0:  # the mean over layers leaves the embedding out
            return
        for h in event.sequences:
            magnitudes = h[: self.tokens].abs()
            padding = (0, 0, 0, self.tokens - len(magnitudes))
            counted_rows = F.pad(torch.ones(len(magnitudes), 1), padding)
            self.add((), F.pad(magnitudes, padding), counted_rows)

    def picture(self) -> Float[Tensor, "tokens bins"]:
        """Return mean |x| by position and channel bin, a bin's value being its largest channel's.

        Positions that no sequence has are left out.
        """
        total, counts = self.sums[()]
        covered = counts.squeeze(1) > 0
        mean = total[covered] / counts[covered]
        width = mean.shape[1]
        num_bins = min(self.bins, width)
        bin_of_channel = torch.arange(width) * num_bins // width
        pooled = mean.new_zeros(len(mean), num_bins)
        return pooled.scatter_reduce(1, bin_of_channel.expand_as(mean), mean, "amax")

    def rows(self) -> Frame:
        return exact_rows(
            (None, None, pixel, "hidden_picture", "paper", value)
            for pixel, value in (_pixels(self.picture(), causal=False) if self.sums else ())
        )
