"""`watch`: let probes see a model run, and leave the model as it was."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.attention import Attention, Flow
from wakeful.model.block import Block
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

    A layer whose value route attends several times is one event, its weights mixed as the route
    says.
    """

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.valid: Tensor | None = None
        """The running pass's real tokens, None if none is padding."""
        self.calls: list[AttentionEvent] = []
        """The attention calls that the running layer has made."""

    @contextmanager
    def open(self, emit: Emit) -> Iterator[None]:
        """Send the model's events to `emit` inside the context: the embedding (layer −1), then each
        layer's attention and its output.
        """
        blocks = dict(enumerate(self.model.blocks))
        attentions = {layer: block.attention for layer, block in blocks.items()}
        call_shares = {layer: shares_of(layer, block) for layer, block in blocks.items()}
        block_input: list[Tensor] = []

        def before_block(layer: int, args: tuple) -> None:
            block_input[:] = [args[0].detach()]
            self.calls = []
            if layer == 0:
                self.valid = real_tokens(next(arg for arg in args if isinstance(arg, Flow)))
                emit(HiddenEvent(-1, block_input[0], self.valid))

        def before_dot(layer: int, args: tuple, kwargs: dict[str, Any]) -> None:
            shares, unseen = call_shares[layer]
            self.calls.append(self._call(layer, attentions[layer], args, kwargs, unseen))
            if len(self.calls) == len(shares):  # the layer's last
                emit(sum_calls(self.calls, shares))

        def after_block(layer: int, _args: tuple, output: tuple) -> None:
            shares, _ = call_shares[layer]
            if len(self.calls) != len(shares):
                raise WakefulError(
                    f"layer {layer} attended {len(self.calls)} times, and its route gives shares "
                    f"for {len(shares)}: how its weights are mixed is unknown"
                )
            emit(HiddenEvent(layer, output[0].detach(), self.valid, block_input.pop()))

        dots = {layer: attention.dot for layer, attention in attentions.items()}
        with (
            hooked(blocks, before=before_block, after=after_block),
            hooked(dots, before=before_dot, named=True),
        ):
            yield

    def _call(
        self, layer: int, attention: Attention, args: tuple, kwargs: dict[str, Any], unseen: str
    ) -> AttentionEvent:
        """Return the event of one call of a layer's attention. `args` are q, k and v.

        `unseen` says why probes of attention do not apply, "" where they do.
        """
        dot = attention.dot
        heads_per_value = next((route.heads_per_value(layer) for route in attention.attenders), 1)
        q, k, v = (heads.detach().transpose(1, 2) for heads in args)
        length = q.shape[2]
        stored_keys = None
        if dot.stored:  # the first keys are a stored prefix's
            stored_keys, k, v = k[0, :, : dot.stored], k[:, :, dot.stored :], v[:, :, dot.stored :]
        if k.shape[2] != length:  # more keys than the tokens' own: the weights are not L × L
            unseen = unseen or _UNSEEN.format(layer)
            k, v = k[:, :, :length], v[:, :, :length]
        keep = kwargs.get("keep")
        if keep is not None and dot.stored:
            keep = keep[..., dot.stored :]
        if keep is not None:
            _, keep = visibility(keep, self.valid, None)  # None if it is causal
        sink = kwargs["sink"]
        weigh = None if dot.normalizer.fused else dot.normalizer.weights
        return AttentionEvent(
            layer, q, k, v, kwargs.get("scale", dot.scale), keep=keep, valid=self.valid,
            sink=None if sink is None else sink.detach(), before=stored_keys, weigh=weigh,
            unseen=unseen, heads_per_value=heads_per_value,
        )  # fmt: skip


def real_tokens(flow: Flow) -> Tensor | None:
    """Return a mask (B, L) of the real tokens of a forward pass, None if none is padding.

    A token is real if it sees itself: no query sees padding.

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


def shares_of(layer: int, block: Block) -> tuple[tuple[float, ...], str]:
    """Return (shares, unseen): the factor of each of a layer's attention calls in their weighted
    sum, and why probes do not apply to that sum ("" where they do).
    """
    attenders = block.attention.attenders  # routes that attend themselves
    shares = attenders[0].shares(layer) if attenders else (1.0,)
    if not shares:
        return (1.0,), _UNSEEN.format(layer)
    if min(shares) < 0:
        return shares, (
            f"layer {layer} subtracts attention weights from others (shares "
            f"{', '.join(f'{share:g}' for share in shares)}): probes of attention do not apply"
        )
    return shares, ""


def check_one_matrix(model: Decoder, length: int) -> None:
    """Raise `WakefulError` if probes of attention do not apply to a layer, or it has no softmax and
    `length` tokens are too many for whole weights.
    """
    for layer, block in enumerate(model.blocks):
        _, unseen = shares_of(layer, block)
        if unseen:
            raise WakefulError(unseen)
        if not block.attention.dot.normalizer.fused:
            check_whole_length(length)


def sum_calls(calls: list[AttentionEvent], shares: tuple[float, ...]) -> AttentionEvent:
    """Return one event for all calls of a layer's attention: the last, the others in its
    `other_calls`. Calls with different values have no common weights, and `unseen` says so.
    """
    *earlier, last = (
        replace(call, share=float(share)) for call, share in zip(calls, shares, strict=True)
    )
    if not earlier:
        return last
    unseen = last.unseen
    if any(call.v.data_ptr() != last.v.data_ptr() for call in earlier):  # other values
        unseen = _UNSEEN.format(last.layer)
    return replace(last, other_calls=tuple(earlier), unseen=unseen)


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

    forwards: list[None] = []
    with hooked({"": model}, after=lambda *_: forwards.append(None)), source.open(emit):
        yield Watch(probes)
    if forwards and not num_attention_events:
        raise WakefulError(
            f"{type(model).__name__} ran but none of its attention was seen: no layer reached its "
            "attention"
        )


def event_source(model: nn.Module) -> "DecoderSource | HuggingFaceSource":
    """Return the source of events for this model's class."""
    for module in model.modules():  # alone, or in its Transformers class
        if isinstance(module, Decoder):
            return DecoderSource(module)
    as_decoder(model)  # refuses what is not of Transformers either
    from wakeful.probes.huggingface import HuggingFaceSource  # noqa: PLC0415 - Transformers takes seconds to import

    return HuggingFaceSource(model)  # pyright: ignore[reportArgumentType]
