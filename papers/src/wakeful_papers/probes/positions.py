"""Single layers' spectra of values, and norms and importance by position."""

import torch
from torch import Tensor

from wakeful.probes import exact
from wakeful.probes.base import AttentionEvent, HiddenEvent, MeanProbe


class Spectrum(MeanProbe):
    """`value_eigenvalue_sorted`, the i-th largest eigenvalue of (1/L) Σ v vᵀ of one `layer`, heads
    joined, its `position` being i, from 1 to `curve` (Value Residual Learning, eq. 12 and fig. 12).
    """

    def __init__(self, *, layer: int = 0, curve: int = 64) -> None:
        super().__init__()
        self.layer = layer
        self.curve = curve

    def see_attention(self, event: AttentionEvent) -> None:
        if event.layer != self.layer:
            return
        for sequence in event.sequences:
            spectrum = exact.value_spectrum(sequence.values.transpose(0, 1).flatten(1))
            for i, value in enumerate(spectrum[: self.curve].tolist(), start=1):
                self.put(event.layer, "value_eigenvalue_sorted", value, position=str(i))


class Positions(MeanProbe):
    """`importance_at` (heads averaged), `value_norm_at` (heads joined) and `hidden_norm_at`, each
    with a row for every position of the first `tokens` (Value Residual Learning, fig. 19).
    """

    def __init__(self, *, tokens: int = 64) -> None:
        super().__init__()
        self.tokens = tokens

    def see_hidden(self, event: HiddenEvent) -> None:
        for h in event.sequences:
            self._put(event.layer, "hidden_norm_at", torch.linalg.vector_norm(h, dim=-1))

    def see_attention(self, event: AttentionEvent) -> None:
        for sequence, statistics in zip(event.sequences, event.statistics, strict=True):
            norms = torch.linalg.vector_norm(sequence.values.double(), dim=(0, 2))
            self._put(event.layer, "value_norm_at", norms)
            self._put(event.layer, "importance_at", statistics.importance.mean(0))

    def _put(self, layer: int, metric: str, values: Tensor) -> None:
        for position, value in enumerate(values[: self.tokens].tolist()):
            self.put(layer, metric, value, position=str(position))
