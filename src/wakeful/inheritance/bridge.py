"""`bridge`: a closed-form map that replaces the layers that an heir drops; no training.

Where the heir's layer t is the reference's layer s and its next one a later layer than s + 1, with
h the hidden channels of t's feed-forward network, m = W_down h its output, r the rest of the stream
after it, and y the reference's stream after the last layer that is left out,

| map | solved for | W_down becomes |
|---|---|---|
| output | T = argmin Σ w ‖T m + r − y‖² + λ ‖T‖² (ReplaceMe, 2505.02819, eq. 5) | T W_down |
| down | W = argmin Σ w ‖W h + r − y‖² + λ ‖W‖² | W |

over tokens of text, w = 1 / ‖y‖². The architecture stays. A bias of `down` is solved for too,
without a penalty. λ is `ridge` times the mean of w m², or of w h².

**Where a norm N(v) = γ ⊙ v / ρ(v) + β stands between the network and the stream** (`peri`,
`reordered`: Gemma 2, OLMo 2), its divisor ρ is kept at what it was without a bridge: h / ρ stands
for h, m / ρ for m, and (y − r − β) / γ for y − r. Then γ is solved for with the divisor that the
new matrix gives, on y − r − β: one number a channel, or one for all where the norm has one.

**The first token** of a sequence parks attention and is unlike all others: its stream is hundreds
of times as long, in few channels, from early layers on. Counted as any other it would decide the
solution; left out, it comes out with any direction where it grows long inside the gap, and the
sink of later layers is lost. So the others are solved on. Where that leaves the mean first token
more than 30° from the reference's y₁, a constraint makes it y₁ √(‖x₁‖ / ‖y₁‖), x₁ the mean
of the layer's output without a bridge: in the reference's direction, at a length between the
heir's and the reference's. Norms do not see the length, and the whole of it would cost the other
tokens more than it is worth. A first token that was long before the gap keeps its direction by
itself, and there the constraint would only cost (docs/archive/findings.md).
"""

import itertools
from contextlib import AbstractContextManager

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wakeful.config.schema import BridgeConfig
from wakeful.errors import WakefulError
from wakeful.inheritance.equations import Equations, stream_weights
from wakeful.inheritance.layers import LayerMap
from wakeful.inheritance.stream import TextStream, behind_mlp
from wakeful.model.block import Block, PostBlock
from wakeful.model.decoder import Decoder
from wakeful.model.finite import widened
from wakeful.norms.base import Norm
from wakeful.paged import replace_parameter
from wakeful.runs.records import BridgeGap, Gap
from wakeful.terminal.display import OnProgress, ignore_progress
from wakeful.training import NO_AUTOCAST

_MIN_COSINE = 3**0.5 / 2
"""Cosine of the mean first token to the reference's from which no constraint is needed."""


def find_gaps(layers: LayerMap, total: int) -> list[Gap]:
    """Return the gaps that a map leaves between the layers it keeps, in order of depth. The
    reference has `total` layers.

    Layers before the first kept layer are no gap, because no layer is there to carry a bridge. A
    map that reorders or repeats layers has no gaps.
    """
    if not layers.ascends:
        return []
    # `total` stands for the end: layers after the last kept one are a gap too.
    neighbors = itertools.pairwise((*layers.sources, total))
    return [
        Gap(after=layer, first=source + 1, last=next_source - 1)
        for layer, (source, next_source) in enumerate(neighbors)
        if next_source > source + 1
    ]


def check_bridge(decoder: Decoder) -> None:
    """Raise `WakefulError` if the decoder's architecture has no matrix that can carry a bridge: the
    output of each `down` projection must be added to the stream, at most scaled by a norm before.
    """
    if str(decoder.depth) != "residual":
        raise WakefulError(
            f"model.depth = {decoder.depth}: a bridge is folded into a matrix whose output is "
            f"added to the stream, which residual alone does; give --bridge.map none"
        )
    for block in decoder.blocks:
        assert isinstance(block, Block)
        if isinstance(block, PostBlock):
            raise WakefulError(
                f"model.placement = {decoder.placement}: a norm over the whole stream stands "
                f"behind the matrix that would carry a bridge; give --bridge.map none"
            )
        norm = behind_mlp(block)
        # A norm that only scales channels has its own method; that of the base class raises.
        if norm is not None and type(norm).take_scale_and_bias is Norm.take_scale_and_bias:
            raise WakefulError(
                f"model.norm = {norm} behind the matrix that would carry a bridge does more than "
                f"scale channels; give --bridge.map none"
            )


@torch.no_grad()
def bridge(
    heir: Decoder,
    reference: Decoder,
    layers: LayerMap,
    tokens: Int[Tensor, "B L"],
    options: BridgeConfig | None = None,
    *,
    documents: Int[Tensor, "B L"] | None = None,
    autocast: AbstractContextManager[object] = NO_AUTOCAST,
    progress: OnProgress = ignore_progress,
) -> list[BridgeGap]:
    """Put a linear map in place of each run of dropped layers, fitted by ridge regression to the
    reference. The heir is changed in place; return for each map its place and its errors.

    Gaps are bridged in order of depth, each with the earlier bridges in place. Both models run over
    the whole text layer by layer, so that memory holds the activations of one layer of each. The
    normal equations are sums in float64 over blocks of 2,048 tokens; the products of a block are
    computed in float32, or in float64 if the models are.

    Args:
        heir: a decoder whose block t was the reference's block `layers.sources[t]`.
        reference: is not changed.
        layers: the layers that the heir keeps.
        tokens: sequences to solve on.
        options: map and ridge; by default `BridgeConfig()`.
        documents: each token's document number, if tokens attend within their document alone. The
            first token of each document then counts as that of a sequence does: by its mean.
        autocast: context that both models run in.
        progress: called with the number of reference layers done and of all to run.

    Raises:
        WakefulError: the stream is not a plain sum, or the text has too few tokens to solve on.
    """
    options = options or BridgeConfig()
    selected = find_gaps(layers, reference.config.num_layers)
    if options.map == "none" or not selected:
        return []
    check_bridge(heir)
    check_bridge(reference)
    heir_stream, reference_stream = (
        TextStream(decoder, tokens, documents, autocast) for decoder in (heir, reference)
    )
    bridges = []
    num_layers = selected[-1].last + 1  # of the reference that are run
    progress(0, num_layers)
    for gap in selected:
        # The heir runs to the input of the layer before the gap, the reference through the gap.
        heir_stream.advance(gap.after)
        for layer in range(reference_stream.layer, gap.last + 1):
            reference_stream.advance(layer + 1)
            progress(layer + 1, num_layers)
        bridges.append(solve_bridge(heir_stream, reference_stream, gap, options))
    return bridges


def solve_bridge(
    heir: TextStream, reference: TextStream, gap: Gap, options: BridgeConfig
) -> BridgeGap:
    """Solve for one bridge and fold it into the down projection of the layer before the gap, in
    place; return its place and its errors.

    The heir's stream is at the input of that layer, the reference's at the output y of the last
    layer that is left out. The bridge is S = argmin Σ w ‖S f + r − y‖² + λ ‖S‖²: f are the MLP's
    hidden channels h (map "down") or its output m ("output"), r is the rest of the stream. A norm
    behind the MLP is rescaled too. The module's docstring says how such a norm and the first token
    are treated.

    Both errors are Σ w ‖x − y‖² / Σ w ‖y‖², with x the stream in the heir: `plain` without the
    bridge, `error` with it.
    """
    block = heir.blocks[gap.after]
    down, norm = block.mlp.down, behind_mlp(block)
    weight, bias = widened(down.weight), down.bias
    width, hidden = weight.shape
    on_output = options.map == "output"
    size = width if on_output else hidden  # features to solve for, besides the bias
    equations = Equations(size + (bias is not None), width, weight.device)
    old_map = weight.T  # from hidden channels, and a 1 for the bias, to the MLP's output
    if bias is not None:
        old_map = torch.cat([old_map, widened(bias).unsqueeze(0)])
    scale, shift = _affine(norm)
    target_square, plain_error, first_tokens = 0.0, 0.0, _Mean()
    for (mlp_hidden, added, block_output), state, firsts in zip(
        heir.activations(), reference.states(), heir.firsts, strict=True
    ):
        f, out, y = widened(mlp_hidden), widened(block_output), widened(state).to(weight.device)
        rest = out - widened(added) + shift
        if on_output:
            f = f @ weight.T if bias is None else f @ weight.T + widened(bias)
        if bias is not None:
            f = torch.cat([f, torch.ones_like(f[..., :1])], -1)
        if norm is not None:
            mlp_output = f[..., :size] if on_output else f @ old_map.to(f)
            f = f / _divisor(norm, mlp_output)
        # First tokens of sequences or documents enter by their mean, all others by the equations.
        first_tokens.add(*(part[firsts] for part in (f, out, y, rest)))
        f, out, y, rest = (part[~firsts] for part in (f, out, y, rest))
        weights = stream_weights(y)
        target_square += float((weights * y.square().sum(1)).sum())
        plain_error += float((weights * (out - y).square().sum(1)).sum())
        equations.add(f, (y - rest) / scale, weights)
    solution = _solve_equations(equations, size, options.ridge, first_tokens, scale)
    new_weight = solution[:size].T
    new_bias = None if bias is None else solution[size]
    if on_output:  # the map T follows the projection, and is multiplied into weight and bias
        output_map = new_weight
        new_weight = output_map @ weight.double()
        if bias is not None:
            new_bias = solution[size] + output_map @ bias.double()
    replace_parameter(down, "weight", new_weight)
    if new_bias is not None:
        replace_parameter(down, "bias", new_bias)
    error = equations.error(solution) if norm is None else _rescale_norm(norm, heir, reference)
    return BridgeGap(
        gap.after, gap.first, gap.last, plain=plain_error / target_square,
        error=error / target_square,
    )  # fmt: skip


def _affine(norm: Norm | None) -> tuple[Tensor | float, Tensor | float]:
    """Return a norm's scales γ and biases β: 1 and 0 without a norm, β = 0 without biases."""
    if norm is None:
        return 1.0, 0.0
    bias = dict(norm.named_parameters()).get("bias")
    # Some norms multiply by another number than their weight; `folded` then has it.
    scale = norm.folded().get("weight", norm.get_parameter("weight"))
    return widened(scale), 0.0 if bias is None else widened(bias)


def _divisor(norm: Norm, v: Float[Tensor, "*B D"]) -> Float[Tensor, "*B 1"]:
    """Return ρ(v), the number that a norm divides its input v by."""
    centered = v - v.mean(-1, keepdim=True) if norm.centers else v
    return (centered.square().mean(-1, keepdim=True) + norm.spec.eps).sqrt()


def _rescale_norm(norm: Norm, heir: TextStream, reference: TextStream) -> float:
    """Scale the weight of the norm behind the MLP, in place, to fit the outputs that the new matrix
    gives; return the error Σ w ‖x − y‖² that is left.

    The factor is g = argmin Σ w (g n − z)², with n the norm's output and z = y − r, both without
    its bias: one for each channel, or one for all if the norm has a single scale.
    """
    _, shift = _affine(norm)
    # Σ w n², Σ w n z and Σ w z² of each channel.
    nn_sum, nz_sum, zz_sum = (torch.zeros((), dtype=torch.float64) for _ in range(3))
    for (_, added, block_output), state, firsts in zip(
        heir.activations(), reference.states(), heir.firsts, strict=True
    ):
        n, out, y = (
            widened(part)[~firsts] for part in (added, block_output, state.to(added.device))
        )
        rest = out - n
        z, n = (y - rest - shift).double(), (n - shift).double()
        weights = stream_weights(y).double().unsqueeze(1)
        nn_sum = nn_sum.to(z.device) + (weights * n * n).sum(0)
        nz_sum = nz_sum.to(z.device) + (weights * n * z).sum(0)
        zz_sum = zz_sum.to(z.device) + (weights * z * z).sum(0)
    if not norm.scales_channels:
        nn_sum, nz_sum, zz_sum = (
            channels.sum(0, keepdim=True) for channels in (nn_sum, nz_sum, zz_sum)
        )
    factor = nz_sum / nn_sum
    replace_parameter(norm, "weight", norm.get_parameter("weight").double() * factor)
    return float((zz_sum - 2 * factor * nz_sum + factor * factor * nn_sum).sum())


class _Mean:
    """Means of activations over the first tokens of sequences or documents."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.count = 0

    def add(self, *parts: Float[Tensor, "N _"]) -> None:
        """Add N tokens' activations, of several kinds, always in the same order."""
        sums = [part.sum(0, dtype=torch.float64) for part in parts]
        if self.sums:
            sums = [old + new for old, new in zip(self.sums, sums, strict=True)]
        self.sums = sums
        self.count += len(parts[0])

    @property
    def means(self) -> list[Tensor]:
        return [total / self.count for total in self.sums]


def _solve_equations(
    equations: Equations, size: int, ridge: float, first: _Mean, scale: Tensor | float
) -> Tensor:
    """Return Sᵀ, where S minimizes Σ w ‖S f − z‖² + λ ‖S‖². λ, which `ridge` gives, acts on the
    first `size` features; a bias follows them.

    If the mean first token would otherwise change its direction, S f₁ = z₁ is a constraint:
    z₁ = (y₁ √(‖x₁‖ / ‖y₁‖) − r₁) / γ. `first` has the means over first tokens of the features f₁,
    the layer's output x₁ without a bridge, the reference's y₁, and the rest of the stream r₁.
    `scale` is γ of the norm behind the MLP, 1 without one.
    """
    factor = equations.factored(ridge, size)
    solution = torch.cholesky_solve(equations.fz, factor)
    f, x, y, rest = first.means
    if torch.cosine_similarity(rest + scale * (f @ solution), y, dim=0) < _MIN_COSINE:
        target = (y * (x.norm() / y.norm()).sqrt() - rest) / scale
        # The change that meets the constraint and raises the least squares' sum least.
        direction = torch.cholesky_solve(f.unsqueeze(1), factor).squeeze(1)
        solution += torch.outer(direction, target - f @ solution) / (f @ direction)
    return solution
