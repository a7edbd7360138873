"""`bridged_losses`: which run of layers a model loses least by, once it is bridged.

An angle tells how far a run turns the stream, not how much of the turn one linear map can stand
for, nor what later layers make of the rest. Here each run is left out and bridged on some tokens,
and the loss is measured on others: the reference goes through both once and keeps every layer's
stream, so a run costs one least squares and the layers behind it.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wakeful.config.schema import BridgeConfig
from wakeful.errors import WakefulError
from wakeful.inheritance.bridge import carriers, check_bridge, solve
from wakeful.inheritance.stream import TextStream
from wakeful.model.decoder import IGNORED, Decoder, cross_entropy
from wakeful.runs.records import Gap
from wakeful.terminal.display import OnProgress, ignore_progress
from wakeful.training import AS_IT_IS

_STRIDE = 2
"""Runs are first tried at every second start, then beside the best."""


@torch.no_grad()
def bridged_losses(
    reference: Decoder,
    tokens: Int[Tensor, "B L"],
    dropped: int,
    options: BridgeConfig,
    *,
    pinned: int = 1,
    held_out: int = 4,
    documents: Int[Tensor, "B L"] | None = None,
    autocast: AbstractContextManager[object] = AS_IT_IS,
    progress: OnProgress = ignore_progress,
) -> dict[int, float]:
    """Return the loss, in nats per token, without the run of layers from each start that was tried.

    The first `pinned` layers stay, at least one, and so does the last. The last `held_out`
    sequences are measured on, the others are solved on. `documents` and `autocast` are as `bridge`
    takes them; `progress` is called with every run. The reference is as it was when this returns.

    Raises:
        WakefulError: the stream is not a plain sum, the layers share more than the stream, no run
            fits between the ends, or there are too few sequences.
    """
    check_bridge(reference, "choose by angle, with --bridge.map none")
    if str(reference.route) != "own":
        raise WakefulError(
            f"model.route = {reference.config.route}: its layers read from each other, so none can "
            "be tried without the others; use --choose angle"
        )
    if len(tokens) <= held_out:
        raise WakefulError(f"{len(tokens)} sequences to choose by leave none to solve on")
    total = reference.config.num_layers
    starts = range(max(1, pinned), total - dropped)
    if not starts:
        raise WakefulError(
            f"no run of {dropped} layers fits between the ends of {total} layers: "
            "keep more --layers"
        )
    strided = starts[::_STRIDE]
    progress(0, len(strided))
    trial = _Trial(reference, tokens, documents, held_out, options, autocast)
    losses: dict[int, float] = {}
    for start in strided:
        losses[start] = trial.loss(start, dropped)
        progress(len(losses), len(strided))
    best = min(losses, key=lambda start: losses[start])
    beside = [start for start in (best - 1, best + 1) if start in starts]
    for start in beside:
        losses[start] = trial.loss(start, dropped)
        progress(len(losses), len(strided) + len(beside))
    return losses


class _Trial:
    """A model, its stream at every layer over a text, and runs of it left out in turn."""

    def __init__(
        self,
        reference: Decoder,
        tokens: Tensor,
        documents: Tensor | None,
        held_out: int,
        options: BridgeConfig,
        autocast: AbstractContextManager[object],
    ) -> None:
        self.reference, self.options = reference, options
        targets = tokens[-held_out:, 1:].to(reference.embed.weight.device)
        self.targets = reference.counted(targets)

        def layers(*part: slice) -> list[TextStream]:
            theirs = None if documents is None else documents[part]
            return _by_layer(TextStream(reference, tokens[part], theirs, autocast))

        self.fitted = layers(slice(-held_out))
        self.measured = layers(slice(-held_out, None), slice(-1))

    def loss(self, start: int, dropped: int) -> float:
        """Return the loss without the layers from `start` on, bridged by the one before them."""
        before, stop = start - 1, start + dropped
        block = self.fitted[before].blocks[before]
        kept = [(part, dict(part.named_parameters())) for part in carriers(block)]
        try:
            gap = Gap(before, start, stop - 1)
            solve(self.fitted[before].copy(), self.fitted[stop].copy(), gap, self.options)
            stream = self.measured[before].copy()
            stream.through(start)
            stream.layer = stop
            stream.through(len(stream.blocks))
            return self._loss(stream.states())
        finally:
            for part, parameters in kept:
                for name, old in parameters.items():
                    setattr(part, name, old)

    def _loss(self, states: Iterator[Float[Tensor, "B L D"]]) -> float:
        total, done = 0.0, 0
        for state in states:
            targets = self.targets[done : done + len(state)]
            with self.measured[0].autocast:
                logits = self.reference.logits(self.reference.after_blocks(state))
            total += float(cross_entropy(logits, targets, reduction="sum"))
            done += len(state)
        return total / int((self.targets != IGNORED).sum())


def _by_layer(stream: TextStream) -> list[TextStream]:
    """Return a stream as each of its layers receives it, and as the last puts it out."""
    found = [stream.copy()]
    for layer in range(len(stream.blocks)):
        stream.through(layer + 1)
        found.append(stream.copy())
    return found
