"""`bridged_losses`: the loss without each run of layers, once it is bridged.

An angle says how far a run turns the stream, not how much of the turn one linear map can replace,
nor how later layers react to the rest. Here each run is dropped and bridged on some tokens, and the
loss is measured on others: the reference passes over both once and keeps every layer's stream, so
a run costs one least squares and a pass through the layers after it.
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
from wakeful.training import NO_AUTOCAST

_STRIDE = 2
"""Runs are tried at every second start first, then at the best start's neighbors."""


@torch.no_grad()
def bridged_losses(
    reference: Decoder,
    tokens: Int[Tensor, "B L"],
    num_dropped: int,
    options: BridgeConfig,
    *,
    pinned: int = 1,
    held_out: int = 4,
    documents: Int[Tensor, "B L"] | None = None,
    autocast: AbstractContextManager[object] = NO_AUTOCAST,
    progress: OnProgress = ignore_progress,
) -> dict[int, float]:
    """Return the loss, in nats per token, without `num_dropped` layers from each start tried.

    The first `pinned` layers stay, at least one, and so does the last. Losses are measured on the
    last `held_out` sequences, bridges solved on the others. `documents` and `autocast` are as in
    `bridge`; `progress` is called with every run. The reference is unchanged afterwards.

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
    starts = range(max(1, pinned), total - num_dropped)
    if not starts:
        raise WakefulError(
            f"no run of {num_dropped} layers fits between the ends of {total} layers: "
            "keep more --layers"
        )
    tried = starts[::_STRIDE]
    progress(0, len(tried))
    trial = _BridgeTrials(reference, tokens, documents, held_out, options, autocast)
    losses: dict[int, float] = {}
    for start in tried:
        losses[start] = trial.loss(start, num_dropped)
        progress(len(losses), len(tried))
    best = min(losses, key=lambda start: losses[start])
    neighbors = [start for start in (best - 1, best + 1) if start in starts]
    for start in neighbors:
        losses[start] = trial.loss(start, num_dropped)
        progress(len(losses), len(tried) + len(neighbors))
    return losses


class _BridgeTrials:
    """Trials of runs of a model's layers to drop, on its stream at every layer over a text."""

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
            part_documents = None if documents is None else documents[part]
            return _layer_streams(TextStream(reference, tokens[part], part_documents, autocast))

        self.fitted = layers(slice(-held_out))
        self.measured = layers(slice(-held_out, None), slice(-1))

    def loss(self, start: int, dropped: int) -> float:
        """Return the loss without `dropped` layers from `start`, bridged by the one before."""
        before, stop = start - 1, start + dropped
        block = self.fitted[before].blocks[before]
        originals = [(part, dict(part.named_parameters())) for part in carriers(block)]
        try:
            gap = Gap(before, start, stop - 1)
            solve(self.fitted[before].copy(), self.fitted[stop].copy(), gap, self.options)
            stream = self.measured[before].copy()
            stream.through(start)
            stream.layer = stop
            stream.through(len(stream.blocks))
            return self._loss(stream.states())
        finally:
            for part, parameters in originals:
                for name, parameter in parameters.items():
                    setattr(part, name, parameter)

    def _loss(self, states: Iterator[Float[Tensor, "B L D"]]) -> float:
        total, done = 0.0, 0
        for state in states:
            targets = self.targets[done : done + len(state)]
            with self.measured[0].autocast:
                logits = self.reference.logits(self.reference.after_blocks(state))
            total += float(cross_entropy(logits, targets, reduction="sum"))
            done += len(state)
        return total / int((self.targets != IGNORED).sum())


def _layer_streams(stream: TextStream) -> list[TextStream]:
    """Return the stream at the input of each layer, and at the output of the last."""
    streams = [stream.copy()]
    for layer in range(len(stream.blocks)):
        stream.through(layer + 1)
        streams.append(stream.copy())
    return streams
