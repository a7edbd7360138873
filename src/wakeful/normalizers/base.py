"""What turns attention logits into weights.

Every normalizer here is a softmax with a constant e^s added to its denominator, for each head;
s = −∞ is the ordinary softmax. That form is what lets any fused kernel serve it: see
`wakeful.model.attend`.
"""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float
from torch import Tensor, nn

from wakeful.shape import Shape
from wakeful.variants import Variant


class Normalizer(Variant, nn.Module, ABC):
    """p_i = e^{x_i} / (e^s + Σ_j e^{x_j}) for one layer; a subclass chooses s."""

    def __init__(self) -> None:
        super().__init__()

    def attach(self, shape: Shape) -> None:
        """Make the parameters of one layer with this shape."""
        self.num_heads = shape.num_heads

    def start_plain(self) -> str:
        """Set the parameters as near the softmax as can be; return what is changed, or ""."""
        return "" if str(self) == self.neutral else f"{self} takes a share from every weight"

    @abstractmethod
    def log_sink(self) -> Float[Tensor, "heads"] | None:
        """Return s for each head, or None for s = −∞ (nothing added)."""

    def weights(self, logits: Float[Tensor, "B H L S"]) -> Float[Tensor, "B H L S"]:
        """Return the attention weights by their definition; masked logits are −∞."""
        return sink_softmax(logits, self.log_sink())


def sink_softmax(
    logits: Float[Tensor, "B H L S"], sink: Float[Tensor, "H"] | None
) -> Float[Tensor, "B H L S"]:
    """Return e^{x_i} / (e^s + Σ_j e^{x_j}) over the last axis, by the definition.

    Stable: with m = max(s, max x) it is e^{x_i − m} / (e^{s − m} + Σ_j e^{x_j − m}). The precision
    is the logits'. A query whose logits are all −∞ gets zero weights.
    """
    top = logits.amax(-1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)
    extra = torch.zeros_like(top)
    if sink is not None:
        column = sink.to(logits.dtype).view(1, -1, 1, 1)
        top = torch.maximum(top, column)
        extra = torch.exp(column - top)
    exponentials = torch.exp(logits - top)
    total = extra + exponentials.sum(-1, keepdim=True)
    return exponentials / total.clamp_min(torch.finfo(logits.dtype).tiny)
