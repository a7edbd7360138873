"""`watch`: let probes see a model run, and leave the model as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.probes.base import AttentionEvent, Event, Frame, Probe, gather
from wakeful.probes.decoder import DecoderSource
from wakeful.probes.huggingface import HuggingFaceSource
from wakeful.probes.running import as_decoder
from wakeful.probes.sources import EventSource


@dataclass(frozen=True)
class Watch:
    """The probes of one `watch`; they keep what they saw after it ends."""

    probes: tuple[Probe, ...]

    @property
    def frame(self) -> Frame:
        """The rows of all probes: mean ± standard error over the sequences seen."""
        return gather(self.probes)


@contextmanager
def watch(model: nn.Module, *probes: Probe) -> Iterator[Watch]:
    """Show every forward pass of `model` inside the context to the probes.

        with watch(model, Sinks(), Ranks(tau=0.9)) as seen:
            model(ids)
        seen.frame

    Outputs are bit for bit those of the model alone: its own attention function computes them, and
    the probes compute beside it. Each forward takes whole sequences, without a cache.

    Raises:
        WakefulError: the model has no causal attention that can be seen, or is in training mode.
    """
    if model.training:
        raise WakefulError("dropout would be measured too: call model.eval() before watching it")
    source = event_source(model)
    seen = 0

    def emit(event: Event) -> None:
        nonlocal seen
        seen += isinstance(event, AttentionEvent)
        # The probes' arithmetic must be neither recorded nor lowered to autocast's precision.
        device = event.q.device if isinstance(event, AttentionEvent) else event.h.device
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            for probe in probes:
                probe.see(event)

    calls = 0

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    handle = model.register_forward_hook(count)
    try:
        with source.open(emit):
            yield Watch(probes)
    finally:
        handle.remove()
    if calls and not seen:
        raise WakefulError(
            f"{type(model).__name__} ran but none of its attention was seen: "
            f"{source.reason_for_silence}"
        )


def event_source(model: nn.Module) -> EventSource:
    """Return what makes events of this model's forward passes: the one place that chooses."""
    inner = [module for module in model.modules() if isinstance(module, Decoder)]
    if inner:  # alone, or in its Transformers class
        return DecoderSource(inner[0])
    decoder = as_decoder(model)
    return HuggingFaceSource(model) if decoder is None else DecoderSource(decoder)  # pyright: ignore[reportArgumentType]
