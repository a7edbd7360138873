"""A sink that each query sets for itself."""

from collections.abc import Mapping

from torch import Tensor, nn

from wakeful.normalizers.base import Normalizer
from wakeful.variants.roles import Role
from wakeful.variants.shape import Shape


class QuerySink(Normalizer):
    """p_i = e^{x_i} / (e^s + Σ_j e^{x_j}) with s = w · h for each head, h the query's input.

    As in Inkling 2 (Transformers' `Inkling2SlidingAttention.sink_proj`): h is the normalized input
    of the attention at the query, w a row of an (H, D) matrix without a bias. It starts at zero,
    which is softmax-1; theirs is drawn.
    """

    name = "query_sink"
    examples = ("query_sink",)

    def attach(self, shape: Shape) -> None:
        super().attach(shape)
        self.sinks = nn.Linear(shape.width, shape.num_heads, bias=False)
        nn.init.zeros_(self.sinks.weight)

    def roles(self) -> Mapping[str, Role]:
        return {"sinks.weight": Role(residual=1, decays=True, quantized=True)}

    def log_sink(self, x: Tensor) -> Tensor:
        return self.sinks(x)
