"""The base class of norms, and the settings that each receives from the decoder."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from jaxtyping import Float
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.variants import Variant

NormSite = Literal["attention", "attention_output", "mlp", "mlp_output", "final", "query", "key"]
"""Before a layer's attention or feed-forward network (or over its sum with the stream, where the
placement says so), after one of them, before the head, or of the query or key heads."""


@dataclass(frozen=True, kw_only=True)
class NormSpec:
    """Settings of one norm in a model: its position, channels and ε."""

    part: NormSite
    layer: int
    """From 0; the final norm's is the number of layers."""
    num_layers: int
    width: int
    """Channels that it normalizes."""
    eps: float
    """Added to the variance."""
    bias: bool
    """True if the model has biases."""


class Norm(Variant, nn.Module, ABC):
    """A normalization over the channels; one module for each position in the model."""

    spec: NormSpec
    centers: ClassVar[bool] = False
    """True if the norm subtracts the mean over the channels."""
    scales_channels: ClassVar[bool] = False
    """True if single channels have scales or biases, which a rotation would mix."""
    folded_name: ClassVar[str] = ""
    """The expression of a simpler norm that is the same function with the `folded` parameters."""

    def __init__(self) -> None:
        super().__init__()

    def attach(self, spec: NormSpec) -> None:
        """Create the parameters for one position in the model."""
        self.spec = spec

    def take_scale_and_bias(self) -> tuple[Tensor | None, Tensor | None]:
        """Set the channels' scales γ to 1 and their biases β to 0, and return (γ, β) as they were;
        None for one that the norm does not have.

        The norm then commutes with rotations (if it `centers`, with those of vectors of zero mean).

        Raises:
            WakefulError: the class of the norm does not override this method.
        """
        raise WakefulError(f"model.norm = {self} has no scale that could be taken out of it")

    def take_over(self, reference: "Norm") -> None:
        """Adapt this norm's parameters to its layer, so that it computes what `reference` does.

        They were copied from `reference`, the same norm in another layer.
        """

    def folded(self) -> dict[str, Tensor]:
        """Return parameters by name, with which the simpler norm `folded_name` is this function."""
        return {}

    @abstractmethod
    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """Return the normalized states, in the dtype they came in."""
