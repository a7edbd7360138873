"""What calibration text shows of a layer."""

from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Seen:
    """What calibration text shows of a layer with K inputs."""

    channels: Tensor
    """(K,), the largest |x| of each input channel."""
    sums: Tensor
    """(K,), Σ|x| of each, over tokens."""
    outputs: float
    """The largest |y|."""
    products: Tensor | None
    """(K, K), XᵀX in float32, where it was asked for."""
    readers: "Readers"
    """The layers that read the same tensor."""
    of_norm: bool = True
    """Whether a norm put out what the layer reads; looked at for a method that asks."""


@dataclass
class Readers:
    """Layers that read one tensor."""

    weights: Tensor
    """(K,), the largest |W| of each input channel over all of them."""
    layers: list[tuple[Tensor, Seen]] = field(default_factory=list)
    """Matrices (N, K) and what is seen of each."""
    divisor: Tensor | None = None
    """(K,), what all divide the tensor by, once it is found."""
