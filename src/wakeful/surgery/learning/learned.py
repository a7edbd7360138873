"""`Learned`: a rotation of the residual stream and one of every layer's values, learned on text.

min L(Q, R_1, …, R_N) over Q ∈ O(n) and R_l ∈ O(d), by steps that stay in the groups. With
G = ∂L/∂Q, the gradient along the curves e^{tS} Q of skew S is A = G Qᵀ − Q Gᵀ. Adam makes a step S
of it, and Q ← (I − S/2)⁻¹ (I + S/2) Q is the Cayley transform that SpinQuant (2405.16406) takes by
momentum. Where norms take the mean out, S (1, …, 1) = 0, so that Q keeps that direction.

Local losses see samples of what norms and the heads of attention put out, and of the matrices that
read it. The model's own loss sees the model with x ↦ x̂(x Qᵀ) Q before each linear layer: what the
rotated layer computes, its weights as they are. Nothing here changes the model: `rotate` does, by
the `Bases` that come of it.

Shapes: B matrices, n their width, M rows of K = H·n channels.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from wakeful.display import Passed, unseen
from wakeful.errors import WakefulError
from wakeful.model.block import Block
from wakeful.model.decoder import Decoder
from wakeful.model.hooks import hooked
from wakeful.optim.build import warmup_cosine
from wakeful.optim.rotations.base import Identity, generator_for, rotation_of
from wakeful.surgery.learning.losses import Local, Loss, NextToken, Whip, straight
from wakeful.surgery.rotate import Bases, check_rotates, exchanged, rotate, stream_readers, turning
from wakeful.variants import Variant, build

Site = Mapping[str, Tensor]
"""Rows (B, M, K) that a matrix each turns: `inputs` of linear layers, and their `weights`."""
Matrices = Sequence[Tensor]
"""The stream's Q (1, n, n), and R (B, d, d) of every layer or one for all of them."""
SAMPLED = 8192
"""Rows that are kept, over all places of the stream; of each layer's values, an eighth."""
BATCH = 512
"""Rows of them that a step looks at, for each matrix."""
SEQUENCES = 2
"""Sequences that a step of the model's own loss reads."""


_WHIP = Whip()


class _Here(Identity):
    """The basis as it is: norms' scales alone go into what reads them."""


class Learned(Variant):
    """A rotation that lowers `loss`, from a random one (`hadamard`) or one by eigenvectors (`pca`).

    With `pca` Q starts as H Eᵀ, H random and the columns of E the eigenvectors of what it turns (as
    ResQ, 2412.14363, projects), which evens out the channels' variances. `lr` is Adam's and falls
    to 0 by a cosine.
    """

    examples = ("learned", "learned(loss=kurtosis, start='pca', steps=20)")

    def __init__(
        self, *, loss: Loss = _WHIP, start: Literal["hadamard", "pca"] = "hadamard",
        steps: int = 100, lr: float = 0.01,
    ) -> None:  # fmt: skip
        if steps < 0 or not lr > 0:
            raise WakefulError(
                f"learned: steps must be at least 0 and lr above 0, got {steps} and {lr:g}"
            )
        self.loss = loss
        self.start: Literal["hadamard", "pca"] = start
        self.steps = steps
        self.lr = lr

    def learn(
        self, decoder: Decoder, text: Int[Tensor, "B L"], *, seed: int = 0, told: Passed = unseen
    ) -> Bases:
        """Return the bases that lower the loss on a text, for `rotate` of this decoder.

        Args:
            decoder: stays as it is.
            text: sequences of token ids.
            seed: of the start, the samples and their order.
            told: how many steps of how many are done.

        Raises:
            WakefulError: see `check_rotates`; or the loss is not finite.
        """
        check_rotates(decoder, "hadamard")
        plain = rotate(decoder, _Here(), values=False).requires_grad_(False)
        sites = sampled(plain, text, generator_for(seed, "sampled", len(text)))
        start = self._start(plain, sites, seed)
        order, loss = generator_for(seed, "order", self.steps), self.loss

        def measured(matrices: Matrices, order: torch.Generator | None) -> Tensor:
            if not isinstance(loss, NextToken):
                return local_loss(cast(Local, loss), sites, matrices, order)
            rows = slice(None)
            if order is not None:
                rows = torch.randperm(len(text), generator=order)[:SEQUENCES]
            return quantized_loss(plain, text[rows], matrices, loss)

        keeps = plain.norm.centers
        found = minimized(
            partial(measured, order=order), start, steps=self.steps, lr=self.lr, keeps=keeps,
            told=told,
        )  # fmt: skip
        with torch.no_grad():
            fell = float(measured(start, None)), float(measured(found, None))
        stream, values = (exact(each, keeps and not n) for n, each in enumerate(found))
        count = plain.config.num_layers
        return Bases(stream[0], values.expand(count, *values.shape[1:]), str(self), fell)

    def _start(self, plain: Decoder, sites: Sequence[Site], seed: int) -> Matrices:
        """Return the matrices to begin with, float32."""
        made = []
        for part, site in zip(("stream", "values"), sites, strict=True):
            centered = part == "stream" and plain.norm.centers
            turn = turning(rotation_of("hadamard"), part, plain, seed=seed, centered=centered)
            width = plain.config.width if part == "stream" else plain.config.shape.head_width
            each = []
            for rows in site["inputs"]:
                basis = torch.eye(width, dtype=torch.float64, device=rows.device)
                if self.start == "pca":
                    basis = eigenvectors(rows.reshape(-1, width).double(), keeps=centered)
                each.append(turn(basis).mT.float())
            made.append(torch.stack(each))
        return made


def learned_of(expression: str) -> Learned | None:
    """Return what learns the rotation that an expression names; None for one that is drawn."""
    name = expression.partition("(")[0].strip()
    return build("surgery.learning", expression, imports=True) if name == "learned" else None


def minimized(
    objective: Callable[[Matrices], Tensor],
    start: Matrices,
    *,
    steps: int,
    lr: float,
    keeps: bool = False,
    told: Passed = unseen,
) -> Matrices:
    """Return orthogonal matrices (B, n, n) at which an objective is lower than at the start.

    `keeps` holds the first one's matrices to those that keep (1, …, 1), as it does at the start.

    Raises:
        WakefulError: the objective is not finite.
    """
    found = [each.detach().clone() for each in start]
    angles = [nn.Parameter(torch.zeros_like(each)) for each in found]
    adam = torch.optim.Adam(angles, lr=lr)
    for step in range(steps):
        told(step, steps)
        loss = objective([each.requires_grad_() for each in found])
        if not loss.isfinite():
            raise WakefulError(f"learned: the loss is {loss.item()} in step {step}: lower lr")
        gradients = torch.autograd.grad(loss, found)
        for angle, each, gradient in zip(angles, found, gradients, strict=True):
            product = gradient @ each.detach().mT
            angle.grad = product - product.mT
        rate = warmup_cosine(step, steps=steps, warmup_steps=0, initial=lr, peak=lr, final=0.0)
        adam.param_groups[0]["lr"] = rate
        adam.step()
        with torch.no_grad():
            for number, angle in enumerate(angles):
                half = (_centered(angle) if keeps and not number else angle) / 2
                one = torch.eye(half.shape[-1], dtype=half.dtype, device=half.device)
                moved = torch.linalg.solve(one - half, (one + half) @ found[number])
                found[number] = moved
                angle.zero_()
    told(steps, steps)
    return found


def exact(matrices: Float[Tensor, "B n n"], keeps: bool = False) -> Float[Tensor, "B n n"]:
    """Return the orthogonal matrices next to these, in float64 (Newton's and Schulz's iteration);
    with `keeps` ones that keep (1, …, 1).
    """
    made = matrices.detach().double()
    if keeps:
        made = _centered(made) + 1 / made.shape[-1]
    for _ in range(4):
        made = 1.5 * made - 0.5 * made @ made.mT @ made
    return made


def _centered(matrices: Tensor) -> Tensor:
    """Return P M P with P = I − 11ᵀ / n."""
    rows = matrices - matrices.mean(-1, keepdim=True)
    return rows - rows.mean(-2, keepdim=True)


def eigenvectors(rows: Float[Tensor, "M n"], *, keeps: bool) -> Float[Tensor, "n n"]:
    """Return the eigenvectors of rows' second moments in columns; where rows are free of their mean
    (`keeps`) times a reflection, so that the matrix keeps (1, …, 1).
    """
    spread = rows.mT @ rows
    if not keeps:
        return torch.linalg.eigh(spread).eigenvectors
    # Below all others, so that (1, …, 1) comes first, which the reflection puts in its own place.
    found = torch.linalg.eigh(spread - spread.trace() / len(spread)).eigenvectors
    return exchanged(torch.cat([found[:, :1] * found[:1, :1].sign(), found[:, 1:]], dim=1))


@torch.no_grad()
def sampled(plain: Decoder, text: Int[Tensor, "B L"], generator: torch.Generator) -> list[Site]:
    """Return rows that the stream's matrix turns and the values' of each layer, or one for all
    where a route reads other layers' values: inputs of root mean square 1, and weights.
    """
    readers = dict(stream_readers(plain))
    readers.pop(plain.norm)  # what the head reads
    blocks = [cast(Block, block) for block in plain.blocks]
    few = SAMPLED // 8
    stream, values = [], [list[Tensor]() for _ in blocks]

    def some(rows: Tensor, count: float) -> Tensor:
        rows = rows.reshape(-1, rows.shape[-1])
        chosen = torch.randint(len(rows), (max(1, round(count)),), generator=generator)
        return rows[chosen.to(rows.device)].float()

    def see_norm(_norm: nn.Module, _args: tuple[Any, ...], output: Tensor) -> None:
        stream.append(_even(some(output, SAMPLED / len(text) / len(readers))))

    def see_heads(layer: int, args: tuple[Any, ...]) -> None:
        values[layer].append(_even(some(args[0], few / len(text))))

    outs = {layer: block.attention.out for layer, block in enumerate(blocks)}
    with hooked({norm: norm for norm in readers}, after=see_norm), hooked(outs, before=see_heads):
        for row in text:
            plain.hidden(row[None])
    linears = [linear for each in readers.values() for linear in each]
    whole = sum(len(linear.weight) for linear in linears)
    weights = [some(each.weight, SAMPLED * len(each.weight) / whole) for each in linears]
    of_values = torch.stack([torch.cat(rows) for rows in values])
    of_outs = torch.stack([some(block.attention.out.weight, few) for block in blocks])
    if any(plain.plan.reads):
        of_values, of_outs = of_values.flatten(0, 1)[None], of_outs.flatten(0, 1)[None]
    return [
        {"inputs": torch.cat(stream)[None], "weights": torch.cat(weights)[None]},
        {"inputs": of_values, "weights": of_outs},
    ]


def _even(rows: Float[Tensor, "M K"]) -> Float[Tensor, "M K"]:
    """Return rows of root mean square 1; zeros stay zeros."""
    size = rows.square().mean(1, keepdim=True).sqrt()
    return rows / size.clamp_min(torch.finfo(rows.dtype).tiny)


def turned(
    rows: Float[Tensor, "B M K"], matrices: Float[Tensor, "B n n"]
) -> Float[Tensor, "B M K"]:
    """Return each n channels of rows turned: x Qᵀ."""
    return (rows.reshape(len(rows), -1, matrices.shape[-1]) @ matrices.mT).reshape(rows.shape)


def local_loss(
    loss: Local, sites: Sequence[Site], matrices: Matrices, order: torch.Generator | None = None
) -> Tensor:
    """Return the stream's loss plus the values', a mean over layers: of all rows, or of some that
    `order` draws.
    """
    total = torch.zeros((), device=matrices[0].device)
    for site, group in zip(sites, matrices, strict=True):
        for part in loss.parts:
            rows = site[part]
            if order is not None:
                rows = rows[:, torch.randint(rows.shape[1], (BATCH,), generator=order)]
            total = total + loss.of(part, turned(rows, group))
    return total


def quantized_loss(
    plain: Decoder, text: Int[Tensor, "B L"], matrices: Matrices, loss: NextToken
) -> Tensor:
    """Return the next-token loss of the rotated model whose blocks' linear layers round inputs."""
    stream, values = matrices
    matrix: dict[nn.Module, Tensor | None] = {}
    for number, block in enumerate(cast(Iterable[Block], plain.blocks)):
        matrix |= {each: None for each in block.modules() if isinstance(each, nn.Linear)}
        matrix[block.attention.out] = values[number % len(values)]
    matrix |= {each: stream[0] for _, linears in stream_readers(plain) for each in linears}
    del matrix[plain.head]

    def rounded(linear: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x, basis = args[0], matrix[linear]
        rows = x.reshape(1, -1, x.shape[-1]).float()
        rows = rows if basis is None else turned(rows, basis[None])
        rows = straight(rows[0], loss.grid)[None]
        rows = rows if basis is None else turned(rows, basis.mT[None])
        return rows.to(x.dtype).view(x.shape), *args[1:]

    with hooked({each: each for each in matrix}, before=rounded):
        return plain.loss(text[:, :-1], text[:, 1:])
