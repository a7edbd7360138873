"""What a norm owes: where it stands, and what it does with channels."""

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
class NormPlace:
    """Where a norm stands, and over how many channels."""

    part: NormSite
    layer: int
    """From 0; the final norm's is the number of layers."""
    num_layers: int
    width: int
    """Channels that it normalizes."""
    eps: float
    """Added to the variance."""
    bias: bool
    """Whether the model has biases."""


class Norm(Variant, nn.Module, ABC):
    """A normalization over the channels, one module a place."""

    place: NormPlace
    centers: ClassVar[bool] = False
    """Whether it takes the mean over the channels out."""
    scales_channels: ClassVar[bool] = False
    """Whether channels have scales or biases of their own, which a rotation would mix."""
    plainer: ClassVar[str] = ""
    """The expression of a simpler norm that is the same function with the `folded` parameters."""

    def __init__(self) -> None:
        super().__init__()

    def attach(self, place: NormPlace) -> None:
        """Make the parameters for one place."""
        self.place = place

    def take_scale(self) -> tuple[Tensor | None, Tensor | None]:
        """Take the channels' scales γ and biases β out of the norm, and return them.

        What is left commutes with rotations (of vectors without a mean, where it `centers`).

        Raises:
            WakefulError: it does more with channels than that.
        """
        raise WakefulError(f"model.norm = {self} has no scale that could be taken out of it")

    def take_over(self, reference: "Norm") -> None:
        """Undo what this place changes in parameters copied from the same norm in another layer."""

    def folded(self) -> dict[str, Tensor]:
        """Return the parameters, by name, with which the `plainer` norm does what this one does."""
        return {}

    @abstractmethod
    def forward(self, x: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        """Return the normalized states, in the dtype they came in."""
