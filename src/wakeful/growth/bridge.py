"""`bridge`: a closed-form map in the place of the layers that an heir leaves out; no training.

Where the heir's layer t is the reference's layer s and its next one a later layer than s + 1, with
h the hidden channels of t's feed-forward network, m = W_down h its output, r the rest of the stream
after it, and y the reference's stream after the last layer that is left out,

| map | solved for | W_down becomes |
|---|---|---|
| output | T = argmin Σ w ‖T m + r − y‖² + λ ‖T‖² (ReplaceMe, 2505.02819, eq. 5) | T W_down |
| down | W = argmin Σ w ‖W h + r − y‖² + λ ‖W‖² | W |

over tokens of text, w = 1 or 1 / ‖y‖². The architecture stays. A bias of `down` is solved for too,
without a penalty. λ is `ridge` times the mean of w m², or of w h².

**The first token** of a sequence parks attention and is unlike all others: its stream is hundreds
of times as long, in few channels, from early layers on. Counted as any other it would decide the
solution; left out, it comes out with any direction, and the sink of later layers is lost. `apart`
solves on the others under the constraint that the mean first token comes out as
y₁ √(‖x₁‖ / ‖y₁‖), x₁ the mean that the layer puts out without a bridge: in the reference's
direction, at a length between the heir's and the reference's. Norms do not see the length, and
the whole of it would cost the other tokens more than it is worth (docs/findings.md).
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wakeful.config.schema import BridgeConfig
from wakeful.errors import WakefulError
from wakeful.growth.layers import LayerMap
from wakeful.model.block import Block
from wakeful.model.decoder import Decoder, begins_of
from wakeful.training.setup import AS_IT_IS

_AT_ONCE = 2048
"""Tokens that go through a layer together."""


@dataclass(frozen=True)
class Gap:
    """Layers that an heir leaves out, from `first` to `last`, after its own layer `after`."""

    after: int
    first: int
    last: int


@dataclass(frozen=True)
class Bridged:
    """A gap and how far the heir's stream was from the reference's behind it.

    Errors are Σ w ‖x − y‖² / Σ w ‖y‖² over the tokens that were solved on.
    """

    after: int
    first: int
    last: int
    plain: float
    """Without a bridge."""
    error: float


def gaps(layers: LayerMap, total: int) -> list[Gap]:
    """Return the gaps of a map, in order of depth.

    Layers before the map's first have nothing before them that could carry a bridge, and a map
    that goes back or repeats layers leaves no gap.
    """
    sources = layers.sources
    if any(later <= earlier for earlier, later in itertools.pairwise(sources)):
        return []
    ends = [*sources[1:], total]
    return [
        Gap(after, source + 1, end - 1)
        for after, (source, end) in enumerate(zip(sources, ends, strict=True))
        if end > source + 1
    ]


def check_bridge(decoder: Decoder, remedy: str = "give --bridge.map none") -> None:
    """Raise `WakefulError`, which names the remedy, where no matrix can carry a bridge."""
    for field, part, plain in (("placement", decoder.placement, "pre"),
                               ("depth", decoder.depth, "residual")):  # fmt: skip
        if str(part) != plain:
            raise WakefulError(
                f"model.{field} = {part}: a bridge is folded into a matrix whose output is added "
                f"to the stream as it is, which {plain} alone does; {remedy}"
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
    only: Sequence[Gap] | None = None,
    autocast: AbstractContextManager[object] = AS_IT_IS,
) -> list[Bridged]:
    """Give the heir a bridge over each gap of its layers, in place; return what each came to.

    Gaps are bridged in order of depth, each on the stream of the heir with those before it. Both
    models go through all of the text layer by layer, so that the activations of one layer of each
    are held. The normal equations are summed in float64, of products in float32 of 2,048 tokens,
    or in float64 where the models are.

    Args:
        heir: a decoder whose block t was the reference's block `layers.sources[t]`.
        reference: stays as it is.
        layers: the heir's.
        tokens: sequences to solve on.
        options: how; by default as `BridgeConfig` says.
        documents: the number of each token's document, where none sees another; each then has a
            first token of its own.
        only: the gaps to bridge; by default all.
        autocast: the context that both models run in.

    Raises:
        WakefulError: the stream is not a plain sum, or the text has too few tokens to solve on.
    """
    options = options or BridgeConfig()
    wanted = gaps(layers, reference.config.num_layers) if only is None else only
    if options.map == "none" or not wanted:
        return []
    check_bridge(heir)
    ours, theirs = (Stream(each, tokens, documents, autocast) for each in (heir, reference))
    found = []
    for gap in wanted:
        ours.through(gap.after)
        theirs.through(gap.last + 1)
        found.append(solve(ours, theirs, gap, options))
    return found


@torch.no_grad()
def rebridge(
    heir: Decoder,
    reference: Decoder,
    layers: LayerMap,
    before: LayerMap,
    tokens: Int[Tensor, "B L"],
    options: BridgeConfig | None = None,
    *,
    documents: Int[Tensor, "B L"] | None = None,
    autocast: AbstractContextManager[object] = AS_IT_IS,
) -> list[Bridged]:
    """Bridge the gaps that an heir did not have when its layers were `before`, in place.

    A gap that is another one now loses its bridge: where the layer that carried it is still there,
    its matrix is the reference's again. Gaps that stayed keep theirs, with what it has learned, and
    are not among those returned; see `stayed`.

    Raises:
        WakefulError: see `bridge`.
    """
    options = options or BridgeConfig()
    if options.map == "none":
        return []

    def placed(layers: LayerMap) -> dict[tuple[int, int, int], Gap]:
        found = gaps(layers, reference.config.num_layers)
        return {(layers.sources[gap.after], gap.first, gap.last): gap for gap in found}

    old, new = placed(before), placed(layers)
    for source, _, _ in old.keys() - new.keys():
        if source not in layers.sources:
            continue
        name = f"blocks.{layers.sources.index(source)}.mlp.down"
        theirs = reference.get_submodule(f"blocks.{source}.mlp.down")
        heir.get_submodule(name).load_state_dict(theirs.state_dict())
    only = [gap for place, gap in new.items() if place not in old]
    return bridge(
        heir, reference, layers, tokens, options, documents=documents, only=only,
        autocast=autocast,
    )  # fmt: skip


def stayed(bridges: Sequence[Bridged], layers: LayerMap, total: int) -> list[Bridged]:
    """Return those of an earlier heir's bridges that stand over a gap of these layers.

    Each is numbered by the layer that carries it now, and has the errors that it was solved with.
    `total` is the number of the reference's layers.
    """
    carriers = {(gap.first, gap.last): gap.after for gap in gaps(layers, total)}
    return [
        dataclasses.replace(one, after=carriers[one.first, one.last])
        for one in bridges
        if (one.first, one.last) in carriers
    ]


class Stream:
    """A decoder's stream over all of a text, as far as its first layers take it."""

    def __init__(
        self,
        decoder: Decoder,
        tokens: Int[Tensor, "B L"],
        documents: Int[Tensor, "B L"] | None = None,
        autocast: AbstractContextManager[object] = AS_IT_IS,
    ) -> None:
        self.autocast = autocast
        self.blocks = [block for block in decoder.blocks if isinstance(block, Block)]
        self.layer = 0
        rows = max(1, _AT_ONCE // tokens.shape[1])
        device = decoder.embed.weight.device
        parts = tokens.to(device).split(rows)
        numbers = (torch.zeros_like(tokens) if documents is None else documents).to(device)
        divided = [None] * len(parts) if documents is None else numbers.split(rows)
        self.parts = [
            decoder.before_blocks(decoder.embed(part), tokens=part, documents=own)
            for part, own in zip(parts, divided, strict=True)
        ]
        self.firsts = begins_of(numbers).split(rows)
        """Which tokens are the first that their row, or document, has: (B, L) a part."""

    def through(self, layer: int) -> None:
        """Go on to what the layer of this number receives."""
        while self.layer < layer:
            for number, (x, flow) in enumerate(self.parts):
                with self.autocast:
                    out, left = self.blocks[self.layer](x, flow)
                flow.memory.update(left)
                self.parts[number] = out, flow
            self.layer += 1

    def states(self) -> Iterator[Float[Tensor, "B L D"]]:
        """Yield the stream, part by part."""
        return (x for x, _ in self.parts)

    def seen(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Yield what the next layer's `down` reads (B, L, H) and puts out (B, L, D), and what the
        layer puts out (B, L, D), part by part.
        """
        block, seen = self.blocks[self.layer], []
        handle = block.mlp.down.register_forward_hook(
            lambda _, args, output: seen.append((args[0], output))
        )
        try:
            for x, flow in self.parts:
                with self.autocast:
                    out, _ = block(x, flow)
                yield *seen.pop(), out
        finally:
            handle.remove()


class Equations:
    """Σ w f fᵀ, Σ w f zᵀ and Σ w ‖z‖² of features f and targets z, summed in float64.

    Each part's products are in its own dtype.
    """

    def __init__(self, features: int, width: int, device: torch.device) -> None:
        self.ff = torch.zeros(features, features, dtype=torch.float64, device=device)
        self.fz = torch.zeros(features, width, dtype=torch.float64, device=device)
        self.zz = 0.0

    def add(self, f: Tensor, z: Tensor, weights: Tensor) -> None:
        weighted = (f * weights.unsqueeze(1)).T
        with whole_products():
            self.ff += weighted @ f
            self.fz += weighted @ z
        self.zz += float((z.square().sum(1) * weights).sum())

    def error(self, solution: Tensor) -> float:
        """Return Σ w ‖S f − z‖², of a solution Sᵀ."""
        return self.zz + float((solution * (self.ff @ solution - 2 * self.fz)).sum())

    def factored(self, ridge: float, size: int | None = None) -> Tensor:
        """Return the Cholesky factor of Σ w f fᵀ + λ, λ = `ridge` times the mean of w f².

        Only the first `size` entries of f are counted and damped; a bias comes after them.
        """
        damped = self.ff.clone()
        diagonal = damped.diagonal()[:size]
        diagonal += ridge * diagonal.mean()
        factor, failed = torch.linalg.cholesky_ex(damped)
        if failed:
            raise WakefulError(
                f"too little text to solve for {len(diagonal)} columns: "
                "give more --bridge.tokens, or a "
                f"larger --bridge.ridge than {ridge:g}"
            )
        return factor

    def solved(self, ridge: float) -> Tensor:
        """Return Sᵀ with the least Σ w ‖S f − z‖² + λ ‖S‖², λ as of `factored`."""
        return torch.cholesky_solve(self.fz, self.factored(ridge))


@contextlib.contextmanager
def whole_products() -> Iterator[None]:
    """Multiply float32 matrices in float32, whatever shorter format a user allows elsewhere."""
    allowed = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(allowed)


def exact(x: Tensor) -> Tensor:
    """Return a tensor in float32, or in float64 where it is."""
    return x if x.dtype == torch.float64 else x.float()


def solve(ours: Stream, theirs: Stream, gap: Gap, options: BridgeConfig) -> Bridged:
    """Solve for one bridge and fold it into the layer before the gap."""
    down = ours.blocks[gap.after].mlp.down
    weight, bias = exact(down.weight), down.bias
    width, hidden = weight.shape
    through = options.map == "output"
    size = width if through else hidden
    equations = Equations(size + (bias is not None), width, weight.device)
    total, first = 0.0, _Mean()
    for (read, made, put_out), state, firsts in zip(
        ours.seen(), theirs.states(), ours.firsts, strict=True
    ):
        f, out, y = exact(read), exact(put_out), exact(state).to(weight.device)
        rest = out - exact(made)
        if through:
            f = f @ weight.T if bias is None else f @ weight.T + exact(bias)
        if bias is not None:
            f = torch.cat([f, torch.ones_like(f[..., :1])], -1)
        first.add(*(part[firsts] for part in (f, out, y, rest)))
        counted = torch.ones_like(firsts) if options.first == "in" else ~firsts
        f, z, y = (part[counted] for part in (f, y - rest, y))
        lengths = y.square().sum(1)
        weights = 1 / lengths if options.weigh == "relative" else torch.ones_like(lengths)
        total += float((weights * lengths).sum())
        equations.add(f, z, weights)
    if through:
        old = torch.eye(len(equations.ff), width, dtype=torch.float64, device=weight.device)
    else:
        old = torch.cat([weight.T, *([] if bias is None else [bias.unsqueeze(0)])]).double()
    solution = _solved(equations, size, options, first)
    new = solution[:size].T
    down.weight.copy_(new @ weight.double() if through else new)
    if bias is not None:
        bias.copy_(solution[size] + (new @ bias.double() if through else 0))
    return Bridged(
        gap.after, gap.first, gap.last,
        plain=equations.error(old) / total, error=equations.error(solution) / total,
    )  # fmt: skip


class _Mean:
    """Means over sequences, or documents, of what belongs to their first tokens."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.count = 0

    def add(self, *parts: Float[Tensor, "N _"]) -> None:
        sums = [part.sum(0, dtype=torch.float64) for part in parts]
        self.sums = [a + b for a, b in zip(self.sums, sums, strict=True)] if self.sums else sums
        self.count += len(parts[0])

    @property
    def means(self) -> list[Tensor]:
        return [total / self.count for total in self.sums]


def _solved(equations: Equations, size: int, options: BridgeConfig, first: _Mean) -> Tensor:
    """Return Sᵀ with the least Σ w ‖S f − z‖² + λ ‖S‖², and S f₁ = z₁ where first is apart."""
    factor = equations.factored(options.ridge, size)
    solution = torch.cholesky_solve(equations.fz, factor)
    if options.first == "apart":
        f, x, y, rest = first.means
        wanted = y * (x.norm() / y.norm()).sqrt() - rest
        lever = torch.cholesky_solve(f.unsqueeze(1), factor).squeeze(1)
        solution += torch.outer(lever, wanted - f @ solution) / (f @ lever)
    return solution
