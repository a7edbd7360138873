"""`watch`: let probes see a model run, and leave the model as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.attention import Attention, Flow
from wakeful.model.decoder import Decoder
from wakeful.model.hooks import hooked
from wakeful.probes.base import (
    AttentionEvent,
    Emit,
    Event,
    Frame,
    HiddenEvent,
    Probe,
    gather,
    visibility,
)
from wakeful.probes.running import as_decoder
from wakeful.probes.streaming import check_whole_length

if TYPE_CHECKING:
    from wakeful.probes.huggingface import HuggingFaceSource

_UNSEEN = (
    "layer {} attends to more than its own tokens' keys and values once: its weights are not one "
    "L × L matrix, so probes of attention do not apply (those of hidden states do)"
)


class DecoderSource:
    """Source of the events of a `Decoder`: hooks that show its layers' inputs and outputs.

    The attention of a layer whose value route attends in several calls is not seen.
    """

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.valid: Tensor | None = None
        """The running pass's real tokens, None if none is padding."""

    @contextmanager
    def open(self, emit: Emit) -> Iterator[None]:
        """Send the model's events to `emit` inside the context: the embedding (layer −1), then each
        layer's attention and its output.
        """
        blocks = dict(enumerate(self.model.blocks))
        attentions = {layer: block.attention for layer, block in blocks.items()}
        block_input: list[Tensor] = []  # of the running block, kept until its output is known

        def before_block(layer: int, args: tuple) -> None:
            block_input[:] = [args[0].detach()]
            if layer == 0:  # its input is the embedding
                self.valid = real_tokens(next(arg for arg in args if isinstance(arg, Flow)))
                emit(HiddenEvent(-1, block_input[0], self.valid))

        def before_dot(layer: int, args: tuple, kwargs: dict[str, Any]) -> None:
            emit(self._call(layer, attentions[layer], args, kwargs))

        def after_block(layer: int, _args: tuple, output: tuple) -> None:
            emit(HiddenEvent(layer, output[0].detach(), self.valid, block_input.pop()))

        dots = {layer: attention.dot for layer, attention in attentions.items()}
        with (
            hooked(blocks, before=before_block, after=after_block),
            hooked(dots, before=before_dot, named=True),
        ):
            yield

    def _call(
        self, layer: int, attention: Attention, args: tuple, kwargs: dict[str, Any]
    ) -> AttentionEvent:
        """Return the event of one call of a layer's attention.

        `args` are q, k and v, (B, L, heads, d) each. `kwargs` has the sink and perhaps `keep`, the
        pairs of query and key that are seen.
        """
        dot = attention.dot
        # At most one of the layer's routes calls attention itself; other layers give 1.
        heads_per_value = next((route.heads_per_value(layer) for route in attention.attenders), 1)
        q, k, v = (heads.detach().transpose(1, 2) for heads in args)
        stored_keys = None
        if dot.stored:  # the first keys are a stored prefix's
            stored_keys, k, v = k[0, :, : dot.stored], k[:, :, dot.stored :], v[:, :, dot.stored :]
        keep = kwargs.get("keep")
        if keep is not None and dot.stored:
            keep = keep[..., dot.stored :]
        if keep is not None:
            _, keep = visibility(keep, self.valid, None)  # None if it is causal
        sink = kwargs["sink"]
        # A fused normalizer is a softmax with a sink, which the probes know by themselves.
        weigh = None if dot.normalizer.fused else dot.normalizer.weights
        return AttentionEvent(
            layer, q, k, v, dot.scale, keep=keep, valid=self.valid,
            sink=None if sink is None else sink.detach(), before=stored_keys, weigh=weigh,
            unseen=unseen_reason(layer, attention), heads_per_value=heads_per_value,
        )  # fmt: skip


def real_tokens(flow: Flow) -> Tensor | None:
    """Return a mask (B, L) of the real tokens of a forward pass, None if none is padding.

    No query sees padding, not even padding itself: a token is real if it sees itself.

    Raises:
        WakefulError: the pass continues sequences that are in a cache.
    """
    if flow.cache is not None and flow.cache.length:
        raise WakefulError("a watched forward takes whole sequences: leave out the filled cache")
    if flow.keep is None:
        return None
    to_text = flow.keep[..., flow.keep.shape[2] - flow.keep.shape[1] :]  # past a stored prefix
    valid = to_text.diagonal(dim1=1, dim2=2)
    return None if bool(valid.all()) else valid


def unseen_reason(layer: int, attention: Attention) -> str:
    """Return why probes of attention do not apply to a layer, "" where they do."""
    has_one_matrix = all(route.one_matrix for route in attention.attenders)
    return "" if has_one_matrix else _UNSEEN.format(layer)


def check_one_matrix(model: Decoder, length: int) -> None:
    """Raise `WakefulError` if probes of attention do not apply to some layer, for sequences of
    `length` tokens.

    The weights must be one L × L matrix. If they are not a softmax, they are computed whole, which
    `length` may be too large for.
    """
    for layer, block in enumerate(model.blocks):
        if reason := unseen_reason(layer, block.attention):
            raise WakefulError(reason)
        if not block.attention.dot.normalizer.fused:
            check_whole_length(length)


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
    num_attention_events = 0

    def emit(event: Event) -> None:
        nonlocal num_attention_events
        num_attention_events += isinstance(event, AttentionEvent)
        # The probes' arithmetic must be neither recorded nor lowered to autocast's precision.
        device = event.q.device if isinstance(event, AttentionEvent) else event.h.device
        with torch.no_grad(), torch.autocast(device.type, enabled=False):
            for probe in probes:
                probe.see(event)

    forwards: list[None] = []  # an entry for each pass of the model
    with hooked({"": model}, after=lambda *_: forwards.append(None)), source.open(emit):
        yield Watch(probes)
    if forwards and not num_attention_events:
        raise WakefulError(
            f"{type(model).__name__} ran but none of its attention was seen: no layer reached its "
            "attention"
        )


def event_source(model: nn.Module) -> "DecoderSource | HuggingFaceSource":
    """Return the source of events for this model's class.

    Raises:
        WakefulError: the model is neither our decoder nor one of Transformers, or can't be watched.
    """
    for module in model.modules():  # a decoder may be inside our Transformers class
        if isinstance(module, Decoder):
            return DecoderSource(module)
    as_decoder(model)  # raises if it is no Transformers model either
    from wakeful.probes.huggingface import HuggingFaceSource  # noqa: PLC0415 - Transformers takes seconds to import

    return HuggingFaceSource(model)  # pyright: ignore[reportArgumentType]
