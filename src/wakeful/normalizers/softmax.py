"""The ordinary softmax."""

from torch import Tensor

from wakeful.normalizers.base import Normalizer


class Softmax(Normalizer):
    """p_i = e^{x_i} / Σ_j e^{x_j}: the weights of a query always sum to one."""

    examples = ("softmax",)
    neutral = "softmax"

    def log_sink(self, x: Tensor) -> Tensor | None:
        return None
