"""Normalizers of the arena, for `model.normalizer`: `wakeful_papers.normalizers:QuerySink`."""

from collections.abc import Mapping

from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.normalizers import Normalizer
from wakeful.parts.softmax1 import sink_softmax
from wakeful.variants.roles import Role
from wakeful.variants.shape import Shape


class ClippedSoftmax(Normalizer):
    """p = clip((η − γ) softmax(x) + γ, 0, 1) (Bondarenko et al., 2306.12929, eq. 4).

    A weight of the softmax up to −γ / (η − γ) becomes zero, one from (1 − γ) / (η − γ) on becomes
    one, and no gradient flows through either. η is the paper's ζ. For sequences of T tokens the
    paper recommends η = 1 and γ = −α / T with α from 2 to 4: γ = −0.03 is about α = 4 at T = 128.
    """

    examples = (
        "wakeful_papers.normalizers:ClippedSoftmax",
        "wakeful_papers.normalizers:ClippedSoftmax(eta=1.03)",
    )
    neutral = "wakeful_papers.normalizers:ClippedSoftmax(gamma=0.0)"
    fused = False

    def __init__(self, *, gamma: float = -0.03, eta: float = 1.0) -> None:
        super().__init__()
        if gamma > 0 or eta < 1:
            raise WakefulError(
                "clipped_softmax: gamma must be at most 0 and eta at least 1, got "
                f"gamma={gamma:g}, eta={eta:g}"
            )
        self.gamma = gamma
        self.eta = eta

    def weights(self, logits: Tensor) -> Tensor:
        stretched = (self.eta - self.gamma) * sink_softmax(logits, None) + self.gamma
        return stretched.clamp(0, 1)


class QuerySink(Normalizer):
    """p_i = e^{x_i} / (e^s + Σ_j e^{x_j}) with s = w · h for each head, h the query's input.

    As in Inkling 2 (Transformers' `Inkling2SlidingAttention.sink_proj`): h is the normalized input
    of the attention at the query, w a row of an (H, D) matrix without a bias. It starts at zero,
    which is softmax-1; theirs is drawn.
    """

    examples = ("wakeful_papers.normalizers:QuerySink",)

    def attach(self, shape: Shape) -> None:
        super().attach(shape)
        self.sinks = nn.Linear(shape.width, shape.num_heads, bias=False)
        nn.init.zeros_(self.sinks.weight)

    def roles(self) -> Mapping[str, Role]:
        return {"sinks.weight": Role(residual=1, decays=True, quantized=True)}

    def log_sink(self, x: Tensor) -> Tensor:
        return self.sinks(x)
