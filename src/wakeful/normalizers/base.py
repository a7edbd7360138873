"""The base class of normalizers, and the softmax with a constant in its denominator.

A fused normalizer is a softmax with e^s added to its denominator, s for each head or for each head
and query; s = −∞ is the ordinary softmax. Fused kernels compute this form: see
`wakeful.model.attend`. Any other weights are computed by their definition, at reference speed.
"""

from abc import ABC

from jaxtyping import Float
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.variants import Variant
from wakeful.variants.shape import Shape


class Normalizer(Variant, nn.Module, ABC):
    """The weights of one layer: p_i = e^{x_i} / (e^s + Σ_j e^{x_j}) where `log_sink` gives s.

    A subclass that sets `fused = False` gives `weights` instead, and has no sink.
    """

    fused: bool = True
    """True if the weights have that form, which fused kernels compute."""

    def __init__(self) -> None:
        super().__init__()

    def attach(self, shape: Shape) -> None:
        """Create the parameters of one layer with this shape."""
        self.num_heads = shape.num_heads

    def start_plain(self) -> str:
        """Return a sentence on how the weights differ from the softmax's in a model whose blocks
        are copied from one with softmax; "" if they do not.

        A subclass with parameters first sets them so that the weights are as close to the softmax's
        as they can be. This base class sets none.
        """
        if str(self) == self.neutral:
            return ""
        if not self.fused:
            return f"{self} makes other weights of the same logits"
        return f"{self} takes a share from every weight"

    def log_sink(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "*queries heads"] | None:
        """Return s for each head, (H,), or for each query and head, (B, L, H): e^s is added to the
        softmax's denominator. None stands for s = −∞, which adds nothing.

        `x` is the normalized input of the attention.

        Raises:
            WakefulError: the weights are no softmax of this form (`fused` is False).
        """
        raise WakefulError(
            f"model.normalizer = {self} is not a softmax with a constant in its denominator: what "
            "needs a log-sum-exp does not apply"
        )

    def weights(self, logits: Float[Tensor, "B H L S"]) -> Float[Tensor, "B H L S"]:
        """Return the attention weights, which are not negative, for logits in float32 or float64;
        masked logits are −∞. Only normalizers that are not `fused` have this method.

        `wakeful.parts.softmax1.sink_softmax` computes the weights of the fused ones.
        """
        raise NotImplementedError


class Softmax(Normalizer):
    """p_i = e^{x_i} / Σ_j e^{x_j}: the weights of a query always sum to one."""

    examples = ("softmax",)
    neutral = "softmax"

    def log_sink(self, x: Tensor) -> Tensor | None:
        return None
