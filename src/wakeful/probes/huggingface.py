"""Events of any Transformers causal language model.

While a model is watched, the entry of its own attention implementation ("sdpa", "eager", our
softmax-1) in Transformers' `AttentionInterface` is a function that calls that very implementation
and shows q, k and v to the probes. The model's configuration and masks are untouched, so it takes
every branch it takes alone; modules of other models pass straight through.
"""

import inspect
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_utils import AttentionInterface

from wakeful.errors import WakefulError
from wakeful.model.hooks import hooked
from wakeful.probes.base import AttentionEvent, Emit, HiddenEvent, Visibility, visibility
from wakeful.variants.implementations import KNOWN, SOFTMAX1, attention_implementation


class HuggingFaceSource:
    """Watches a decoder-only `PreTrainedModel`."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Find the model's blocks, the layer of each of their modules, and the tables of attention
        functions (`interfaces`) through which they call attention.

        Raises:
            WakefulError: the model can't be watched; the message says why.
        """
        self.model = model
        self.name = type(model).__name__
        config = model.config.get_text_config(decoder=True)
        if model.config.is_encoder_decoder:
            raise WakefulError(
                f"{self.name} can't be watched: it is an encoder-decoder, and the metrics are of "
                "causal decoders"
            )
        self.blocks = decoder_blocks(model, config.num_hidden_layers)
        if len(set(self.blocks)) < len(self.blocks):
            raise WakefulError(
                f"{self.name} can't be watched: one of its layers stands in several places; give "
                "each place a layer of its own (copy.deepcopy)"
            )
        self.layer_of = {
            id(module): layer
            for layer, block in enumerate(self.blocks)
            for module in block.modules()
        }
        # Each modeling file of the blocks' classes names the table that it calls attention by.
        names = {type(module).__module__ for block in self.blocks for module in block.modules()}
        files = [sys.modules[name] for name in sorted(names) if name in sys.modules]
        tables = [vars(file).get("ALL_ATTENTION_FUNCTIONS") for file in files]
        self.interfaces: list[AttentionInterface] = []
        for table in tables:
            is_new = all(table is not interface for interface in self.interfaces)
            if isinstance(table, AttentionInterface) and is_new:
                self.interfaces.append(table)
        self.implementation = attention_implementation(model)
        if not self.interfaces:
            raise WakefulError(
                f"{self.name} can't be watched: its attention, if it has any, does not go through "
                "Transformers' AttentionInterface"
            )
        if self.implementation not in KNOWN:
            raise WakefulError(
                f"{self.name} can't be watched with attn_implementation="
                f"{self.implementation!r}: load it with {' or '.join(map(repr, KNOWN))}"
            )
        self.valid: Bool[Tensor, "B L"] | None = None
        self.masks: dict[tuple[int, int | None], tuple[Tensor, Visibility]] = {}
        """For each mask's id and window: the mask, and what it lets queries see."""

    @contextmanager
    def open(self, emit: Emit) -> Iterator[None]:
        """Send the model's events to `emit` inside the context."""
        with ExitStack() as stack:
            self._hook_hiddens(stack, emit)
            for interface in self.interfaces:
                self._intercept(interface, stack, emit)
            yield

    def _hook_hiddens(self, stack: ExitStack, emit: Emit) -> None:
        """Hook the model, until `stack` closes, to emit a `HiddenEvent` for the embedding (layer
        −1) and for each block.

        Before each forward pass, `valid` gets its padding mask. Before and after, `masks`, what
        attention keeps during a pass, is emptied.
        """
        signature = inspect.signature(self.model.forward)

        def before_model(_name: str, args: tuple, kwargs: dict[str, Any]) -> None:
            mask = signature.bind_partial(*args, **kwargs).arguments.get("attention_mask")
            self.masks = {}
            self.valid = None
            # Only a mask of 2 axes (B, L) is one of padding. If it is all true, it hides nothing.
            if isinstance(mask, Tensor) and mask.ndim == 2 and not bool(mask.all()):
                self.valid = mask.bool()

        def after_model(*_: object) -> None:
            self.masks = {}

        received: dict[int, Tensor] = {}

        def before_block(layer: int, args: tuple, kwargs: dict[str, Any]) -> None:
            received[layer] = (args[0] if args else kwargs["hidden_states"]).detach()
            if layer == 0:
                emit(HiddenEvent(-1, received[layer], self.valid))

        def after_block(layer: int, _args: tuple, output: Any) -> None:
            h = stream_of(output)
            emit(HiddenEvent(layer, h.detach(), self.valid, received.pop(layer)))

        stack.enter_context(
            hooked({"": self.model}, before=before_model, after=after_model, named=True)
        )
        blocks = dict(enumerate(self.blocks))
        stack.enter_context(hooked(blocks, before=before_block, after=after_block, named=True))

    def _intercept(self, interface: AttentionInterface, stack: ExitStack, emit: Emit) -> None:
        """Replace the function by which the model attends, in the table `interface` and until
        `stack` closes, by one that also emits an event if a block of this model calls it.
        """
        name = self.implementation
        assert name is not None
        stock = interface.get(name)

        def attend_and_emit(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None = None,
            **kwargs: Any,
        ):
            """Attend by the stock function, then emit its arguments if a block of this model
            called. Return the stock function's output.
            """
            # "eager" has no entry in the table: each modeling file brings its function.
            function = (
                stock or vars(sys.modules[type(module).__module__])["eager_attention_forward"]
            )
            output = function(module, query, key, value, attention_mask, **kwargs)
            if id(module) in self.layer_of:
                emit(self._event(module, query, key, value, attention_mask, kwargs))
            return output

        def restore() -> None:
            del interface[name]  # after that the library's own entry is seen again
            if stock is not None and interface.get(name) is not stock:
                interface[name] = stock  # it was another watch's, or the user's own

        interface[name] = attend_and_emit
        stack.callback(restore)

    def _event(
        self, module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask, kwargs: dict[str, Any]
    ) -> AttentionEvent:
        """Return the event of one call of the attention function, with the arguments of that call.

        Raises:
            WakefulError: attention is biased by position, not causal, or not of whole sequences.
        """
        if kwargs.get("position_bias") is not None:
            raise WakefulError(
                f"{self.name} can't be watched: it adds a position bias to attention logits"
            )
        causal = kwargs.get("is_causal")
        if causal is None:
            causal = vars(module).get("is_causal", True)
        # Without a mask "eager" attends in both directions; other implementations go by `causal`.
        if mask is None and q.shape[2] > 1 and self.implementation == "eager":
            causal = False
        if q.shape[2] != k.shape[2]:
            raise WakefulError(
                f"{self.name} attended {q.shape[2]} queries to {k.shape[2]} keys: a watched "
                "forward takes whole sequences (use_cache=False, no past_key_values)"
            )
        if not causal:
            raise WakefulError(
                f"{self.name} can't be watched: its tokens attend in both directions, and the "
                "metrics are of causal decoders"
            )
        scaling, sink = kwargs.get("scaling"), kwargs.get("s_aux")
        if self.implementation == SOFTMAX1 and sink is None:
            sink = q.new_zeros(q.shape[1])  # softmax-1 adds e^0 to the denominator
        window, keep = None, None
        if mask is not None:
            sliding_window = kwargs.get("sliding_window")
            key = (id(mask), sliding_window)
            if key not in self.masks:
                # The mask is kept too: while it lives, no other mask can get its id.
                self.masks[key] = (mask, visibility(self._pairs(mask), self.valid, sliding_window))
            window, keep = self.masks[key][1]
        return AttentionEvent(
            self.layer_of[id(module)], q.detach(), k.detach(), v.detach(),
            q.shape[-1] ** -0.5 if scaling is None else float(scaling),
            window=window, keep=keep, valid=self.valid,
            softcap=kwargs.get("softcap"), sink=None if sink is None else sink.detach(),
        )  # fmt: skip

    def _pairs(self, mask: Tensor) -> Bool[Tensor, "#B L L"]:
        """Return a mask (B, 1, L, L), boolean (True: seen) or additive (0: seen), as a boolean one
        without the axis of heads.

        Raises:
            WakefulError: the mask has values between 0 and hidden, or differs between heads.
        """
        if mask.dtype != torch.bool:
            allowed = mask == 0
            # Hidden pairs get -inf or the dtype's least number, or sums of it with others.
            hidden = mask <= torch.finfo(mask.dtype).min / 2
            if not bool((allowed | hidden).all()):
                raise WakefulError(
                    f"{self.name} can't be watched: it adds a position bias (ALiBi or the like) to "
                    "attention logits"
                )
            mask = allowed
        if mask.shape[1] != 1:
            raise WakefulError(f"{self.name} can't be watched: its heads have different masks")
        return mask[:, 0]


def stream_of(output: Any) -> Float[Tensor, "*B D"]:
    """Return a block's output states: the output itself, or the first of a tuple."""
    return output if isinstance(output, Tensor) else output[0]


def decoder_blocks(model: PreTrainedModel, num_layers: int) -> nn.ModuleList:
    """Return the model's list of blocks: of the module lists of this length, the one with the most
    parameters.

    Raises:
        WakefulError: the model has no such list.
    """
    lists = [
        module
        for module in model.modules()
        if isinstance(module, nn.ModuleList) and len(module) == num_layers
    ]
    if not lists:
        raise WakefulError(
            f"{type(model).__name__} can't be watched: it has no list of {num_layers} layers"
        )
    return max(lists, key=lambda blocks: sum(p.numel() for p in blocks.parameters()))
