"""softmax-1: a constant in the denominator, so that a query may attend to nothing."""

import torch
from torch import Tensor, nn

from wakeful.normalizers.base import Normalizer
from wakeful.variants.shape import Shape

_NEARLY_SOFTMAX = -8.0
"""An s that adds 0.0003 to the denominator."""
_NO_SINK = -1000.0
"""An s below this adds nothing to the denominator in any precision, and never learns."""


class Softmax1(Normalizer):
    """p_i = e^{x_i} / (e^s + Σ_j e^{x_j}) with s = 0 (From Attention to Activation, eq. 1).

    `learned=True` makes s a parameter for each head, started at `start`: a learned sink.
    """

    examples = ("softmax1", "softmax1(learned=True)")
    neutral = "softmax1(learned=True, start=-1e9)"

    log_sinks: Tensor

    def __init__(self, *, learned: bool = False, start: float = 0.0) -> None:
        super().__init__()
        self.learned = learned
        self.start = start

    def attach(self, shape: Shape) -> None:
        """Create s for each head, where e^s is added to the softmax's denominator: a parameter if
        `learned`, else a constant, which is not saved.
        """
        super().attach(shape)
        size = (shape.num_heads,)
        if self.learned:
            self.log_sinks = nn.Parameter(torch.full(size, self.start))
        else:
            # On the CPU even if the default device is "meta", on which models are built: a constant
            # is not loaded later.
            log_sinks = torch.full(size, self.start, device="cpu")
            self.register_buffer("log_sinks", log_sinks, persistent=False)

    @torch.no_grad()
    def start_plain(self) -> str:
        """Lower learned sinks s so far that e^s adds nearly nothing to the denominator, but they
        can still learn, unless they start lower. Return a sentence on what they change, "" if
        nothing.
        """
        if self.learned and self.start < _NO_SINK:  # e^s is zero in any precision
            return ""
        if not self.learned or self.start <= _NEARLY_SOFTMAX:
            return super().start_plain()
        self.log_sinks.fill_(_NEARLY_SOFTMAX)
        return f"{self} starts with sinks of e^{_NEARLY_SOFTMAX:g}, for a sink of zero cannot learn"

    def log_sink(self, x: Tensor) -> Tensor:
        return self.log_sinks
