"""The eigenvalues of one layer's values, the whole distribution."""

from wakeful.probes import exact
from wakeful.probes.base import AttentionEvent, MeanProbe


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
            found = exact.value_spectrum(sequence.values.transpose(0, 1).flatten(1))[: self.curve]
            for i, value in enumerate(found.tolist(), start=1):
                self.put(event.layer, "value_eigenvalue_sorted", value, position=str(i))
