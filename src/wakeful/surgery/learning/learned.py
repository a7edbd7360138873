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

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from wakeful.display import Passed, unseen
from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.model.hooks import hooked
from wakeful.optim.build import warmup_cosine
from wakeful.optim.rotations.base import Identity, generator_for, rotation_of
from wakeful.surgery.learning.losses import Local, Loss, NextToken, Whip, straight
from wakeful.surgery.rotate import Bases, check_rotates, exchanged, rotate, stream_readers, turning
from wakeful.variants import Variant, build
from wakeful.world import ALONE, World

Site = Mapping[str, Tensor]
"""Rows (B, M, K) that a matrix each turns: `inputs` of linear layers, and their `weights`."""
Matrices = Sequence[Tensor]
"""The stream's Q (1, n, n), and R (B, d, d) of every layer or one for all of them; float64."""
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
        self.loss, self.steps, self.lr = loss, steps, lr
        self.start: Literal["hadamard", "pca"] = start

    def learn(
        self, decoder: Decoder, text: Int[Tensor, "B L"], *, seed: int = 0, told: Passed = unseen,
        world: World = ALONE,
    ) -> Bases:  # fmt: skip
        """Return the bases that lower the loss on token ids, for `rotate` of this decoder.

        `seed` is of the start, the samples and their order; `told` hears of steps that are done.
        Processes of a world take the bases that its first one found.

        Raises:
            WakefulError: see `check_rotates`; or the loss is not finite.
        """
        check_rotates(decoder, "hadamard")
        plain = rotate(decoder, _Here(), values=False)
        sites = _sampled(plain, text, generator_for(seed, "sampled", len(text)))
        start = [
            self._start(plain, part, site["inputs"], seed)
            for part, site in zip(("stream", "values"), sites, strict=True)
        ]
        order = generator_for(seed, "order", self.steps)

        def whole(matrices: Matrices, order: torch.Generator | None = None) -> Tensor:
            if isinstance(self.loss, Local):
                return local_loss(self.loss, sites, matrices, order)
            read = text
            if order is not None:
                read = text[torch.randperm(len(text), generator=order)[:SEQUENCES]]
            return quantized_loss(plain, read, matrices, cast(NextToken, self.loss))

        keeps = plain.norm.centers
        some = partial(whole, order=order)
        found = minimized(some, start, steps=self.steps, lr=self.lr, keeps=keeps, told=told)
        if world.size > 1:
            found = [world.sum(each if world.first else torch.zeros_like(each)) for each in found]
        with torch.no_grad():
            fell = float(whole(start)), float(whole(found))
        values = found[1].expand(len(plain.blocks), *found[1].shape[1:])
        return Bases(found[0][0], values, str(self), fell)

    def _start(self, plain: Decoder, part: str, inputs: Tensor, seed: int) -> Tensor:
        """Return the matrices of one part to begin with, (B, n, n) in float64."""
        keeps = part == "stream" and plain.norm.centers
        width = plain.config.width if part == "stream" else plain.config.shape.head_width
        turn = turning(
            rotation_of("hadamard"), part, width, plain.embed.weight.device, seed=seed,
            centered=keeps,
        )  # fmt: skip
        rows = inputs.double().reshape(len(inputs), -1, width)
        rows = rows - rows.mean(-1, keepdim=True) if keeps else rows
        if self.start == "hadamard":
            bases = torch.eye(width, dtype=rows.dtype, device=rows.device).expand(len(rows), -1, -1)
        else:  # where there is no mean, (1, …, 1) is put first, and the reflection puts it back
            spread = rows.mT @ rows
            bases = torch.linalg.eigh(spread - keeps * spread.diagonal(0, 1, 2).sum() / width)[1]
        if keeps and self.start == "pca":
            bases = torch.cat([bases[..., :1].abs(), bases[..., 1:]], -1)
            bases = torch.stack([exchanged(each) for each in bases])
        return torch.stack([turn(each) for each in bases]).mT


def learned_of(expression: str) -> Learned | None:
    """Return what learns the rotation that an expression names; None for one that is drawn."""
    name = expression.partition("(")[0].strip()
    return build("surgery.learning", expression, imports=True) if name == "learned" else None


@torch.enable_grad()
def minimized(
    objective: Callable[[Matrices], Tensor], start: Matrices, *, steps: int, lr: float,
    keeps: bool = False, told: Passed = unseen,
) -> Matrices:  # fmt: skip
    """Return orthogonal matrices at which an objective is lower than at the start.

    `keeps` holds the first of them to those that keep (1, …, 1), as it does at the start.

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
        with torch.no_grad():
            for angle, each, gradient in zip(angles, found, gradients, strict=True):
                product = gradient @ each.mT
                angle.grad = product - product.mT
            rate = warmup_cosine(step, steps=steps, warmup_steps=0, initial=lr, peak=lr, final=0.0)
            adam.param_groups[0]["lr"] = rate
            adam.step()
            for number, angle in enumerate(angles):
                half = angle / 2
                if keeps and not number:
                    half = half - half.mean(-1, keepdim=True)
                    half = half - half.mean(-2, keepdim=True)
                one = torch.eye(half.shape[-1], dtype=half.dtype, device=half.device)
                found[number] = torch.linalg.solve(one - half, (one + half) @ found[number])
                angle.zero_()
    told(steps, steps)
    return found


@torch.no_grad()
def _sampled(plain: Decoder, text: Int[Tensor, "B L"], generator: torch.Generator) -> list[Site]:
    """Return rows that the stream's matrix turns and the values' of each layer, or one for all
    where a route reads other layers' values: inputs of root mean square 1, and weights.
    """
    readers = [linears for norm, linears in stream_readers(plain) if norm is not plain.norm]
    outs = [block.attention.out for block in plain.blocks]
    few = SAMPLED // 8
    rows: dict[nn.Module, list[Tensor]] = {each: [] for each in (*outs, *(e[0] for e in readers))}

    def some(x: Tensor, count: float) -> Tensor:
        x = x.reshape(-1, x.shape[-1])
        chosen = torch.randint(len(x), (max(1, round(count)),), generator=generator)
        return x[chosen.to(x.device)].float()

    def see(linear: nn.Module, args: tuple[Any, ...]) -> None:
        x = some(args[0], (few if linear in outs else SAMPLED / len(readers)) / len(text))
        size = x.square().mean(1, keepdim=True).sqrt()
        rows[linear].append(x / size.clamp_min(torch.finfo(x.dtype).tiny))

    with hooked({each: each for each in rows}, before=see):
        for row in text:
            plain.hidden(row[None])
    weights = [linear.weight for linears in readers for linear in linears]
    share = SAMPLED / sum(map(len, weights))
    stream = torch.cat([some(weight, share * len(weight)) for weight in weights])
    values = torch.stack([torch.cat(rows[out]) for out in outs])
    columns = torch.stack([some(out.weight, few) for out in outs])
    if any(plain.plan.reads):
        values, columns = values.flatten(0, 1)[None], columns.flatten(0, 1)[None]
    inputs = torch.cat([torch.cat(rows[each[0]]) for each in readers])
    return [
        {"inputs": inputs[None], "weights": stream[None]}, {"inputs": values, "weights": columns}
    ]  # fmt: skip


def turned(
    rows: Float[Tensor, "B M K"], matrices: Float[Tensor, "B n n"]
) -> Float[Tensor, "B M K"]:
    """Return each n channels of rows turned: x Qᵀ."""
    heads = rows.reshape(len(rows), -1, matrices.shape[-1])
    return (heads @ matrices.mT.to(rows.dtype)).reshape(rows.shape)


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
    bases: dict[nn.Module, Tensor | None] = {}
    for number, block in enumerate(plain.blocks):
        bases |= {each: None for each in block.modules() if isinstance(each, nn.Linear)}
        bases[block.attention.out] = values[number % len(values), None]
    bases |= {each: stream for _, linears in stream_readers(plain) for each in linears}
    del bases[plain.head]

    def rounded(linear: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        rows, basis = args[0].reshape(1, -1, args[0].shape[-1]).float(), bases[linear]
        near = straight(rows[0] if basis is None else turned(rows, basis)[0], loss.grid)[None]
        near = near if basis is None else turned(near, basis.mT)
        return near.to(args[0].dtype).view(args[0].shape), *args[1:]

    with hooked({each: each for each in bases}, before=rounded):
        return plain.loss(text[:, :-1], text[:, 1:])
