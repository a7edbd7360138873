"""Position by position: what the start token has that the others lack."""

import torch

from wakeful.probes.base import AttentionEvent, HiddenEvent, MeanProbe


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

    def _put(self, layer: int, metric: str, values: torch.Tensor) -> None:
        for position, value in enumerate(values[: self.tokens].tolist()):
            self.put(layer, metric, value, position=str(position))
