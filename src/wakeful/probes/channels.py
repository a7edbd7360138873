"""Whether the same channels stand out whatever the text says."""

from typing import Any

import torch

from wakeful.errors import WakefulError
from wakeful.probes.base import Frame, HiddenEvent, MergeableProbe, exact_rows, first_and_rest


class ChannelOverlap(MergeableProbe):
    """`outlier_channel_overlap`: of a sequence's channels with the largest activations, the share
    that are so in another sequence too (From Attention to Activation, section 2.2: outliers are
    "invariant to the input sequence").

    The mean over pairs s ≠ t of |T_k(s) ∩ T_k(t)| / k for each block output, T_k the k of D
    channels with the largest mean of |x_i| over a sequence's tokens, the first or the rest. 1: the
    same channels in all; channels drawn at random share k / D. One sequence alone has no value.

    Raises:
        WakefulError: k is below 1, or above the width of the states that are seen.
    """

    def __init__(self, *, channels: int = 4) -> None:
        if channels < 1:
            raise WakefulError(f"channels = {channels} must be at least 1")
        self.channels = channels
        self.among: dict[tuple[int, str], list[int]] = {}
        """In how many sequences each channel is among the largest, by layer and position."""
        self.sequences: dict[tuple[int, str], int] = {}

    def see_hidden(self, event: HiddenEvent) -> None:
        for h in event.sequences if event.layer >= 0 else ():
            if self.channels > h.shape[-1]:
                raise WakefulError(
                    f"channels = {self.channels} is above the model's width, {h.shape[-1]}"
                )
            for position, part in first_and_rest(h):
                counts = torch.zeros(h.shape[-1], dtype=torch.int64)
                counts[part.abs().mean(0).topk(self.channels).indices.cpu()] = 1
                self._take((event.layer, position), counts.tolist(), 1)

    def _take(self, key: tuple[int, str], counts: list[int], sequences: int) -> None:
        known = self.among.get(key, [0] * len(counts))
        self.among[key] = [a + b for a, b in zip(known, counts, strict=True)]
        self.sequences[key] = self.sequences.get(key, 0) + sequences

    def state(self) -> Any:
        return [[*key, counts, self.sequences[key]] for key, counts in self.among.items()]

    def merge(self, state: Any) -> None:
        for layer, position, counts, sequences in state:
            self._take((layer, position), counts, sequences)

    def rows(self) -> Frame:
        rows = []
        for (layer, position), counts in sorted(self.among.items()):
            pairs = self.sequences[layer, position] * (self.sequences[layer, position] - 1)
            if pairs:
                shared = sum(count * (count - 1) for count in counts) / (self.channels * pairs)
                rows.append((layer, None, position, "outlier_channel_overlap", "paper", shared))
        return exact_rows(rows)
