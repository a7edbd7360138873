"""What values look like: their spectrum, and the drain of the first token's."""

import torch

from wakeful.probes import exact
from wakeful.probes.base import AttentionEvent, Event, MeanProbe


class Values(MeanProbe):
    """`value_eigenvalue`, `value_spectrum` and `value_drain` of the values attention mixes.

    The eigenvalues of (1/L) Σ v vᵀ with a layer's heads joined (Value Residual Learning, eq. 12):
    `value_eigenvalue` is the largest, `value_spectrum` at `position` i is λ_i / λ_1, i from 1 to
    `curve`. `value_drain` is ‖v_0‖ over the mean of the others (fig. 10), variant `paper` with the
    heads joined. Variant `per_head` of both has a row for each key/value head.
    """

    def __init__(self, *, curve: int = 32) -> None:
        super().__init__()
        self.curve = curve

    def see(self, event: Event) -> None:
        if not isinstance(event, AttentionEvent):
            return
        for sequence in event.sequences:
            v = sequence.v if sequence.v.dtype == torch.float64 else sequence.v.float()
            joined = v.transpose(0, 1).flatten(1)
            # The smaller side has the same non-zero eigenvalues.
            length, width = joined.shape
            if length < width:
                moment = joined @ joined.T / length
                spectrum = torch.linalg.eigvalsh(moment).flip(0).clamp_min(0)
            else:
                spectrum = exact.value_spectrum(joined)
            self.put(event.layer, "value_eigenvalue", spectrum[0], position="1")
            each = exact.value_spectrum(v)[:, 0]
            self.put(event.layer, "value_eigenvalue", each, variant="per_head", position="1")
            for i, value in enumerate((spectrum[: self.curve] / spectrum[0]).tolist(), start=1):
                self.put(event.layer, "value_spectrum", value, position=str(i))
            if length > 1:
                drain = exact.value_drain(joined)
                self.put(event.layer, "value_drain", drain, position="first")
                each = exact.value_drain(v)
                self.put(event.layer, "value_drain", each, variant="per_head", position="first")
