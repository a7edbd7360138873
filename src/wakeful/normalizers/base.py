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
        """Set the parameters as close to the softmax as possible; return how the weights differ
        from the softmax's nevertheless, as a sentence, "" if they do not.
        """
        if str(self) == self.neutral:
            return ""
        if not self.fused:
            return f"{self} makes other weights of the same logits"
        return f"{self} takes a share from every weight"

    def log_sink(self, x: Float[Tensor, "B L D"]) -> Float[Tensor, "*queries heads"] | None:
        """Return s for each head, (H,), or for each of the queries too, (B, L, H).

        None is s = −∞: nothing is added. `x` is the normalized input of the attention.

        Raises:
            WakefulError: the weights do not have that form.
        """
        raise WakefulError(
            f"model.normalizer = {self} is not a softmax with a constant in its denominator: what "
            "needs a log-sum-exp does not apply"
        )

    def weights(self, logits: Float[Tensor, "B H L S"]) -> Float[Tensor, "B H L S"]:
        """Return the attention weights by their definition; masked logits are −∞.

        Logits are float32 or float64, whatever the model's dtype. No weight is negative.
        `wakeful.parts.softmax1.sink_softmax` is the definition of all fused weights.
        """
        raise NotImplementedError


class Softmax(Normalizer):
    """p_i = e^{x_i} / Σ_j e^{x_j}: the weights of a query always sum to one."""

    examples = ("softmax",)
    neutral = "softmax"

    def log_sink(self, x: Tensor) -> Tensor | None:
        return None
