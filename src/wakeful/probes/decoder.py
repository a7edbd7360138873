"""Events of our own decoder, by hooks on its blocks and on the attention of each."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.attend import causal_mask
from wakeful.model.attention import DotProduct
from wakeful.model.decoder import Decoder
from wakeful.probes.base import AttentionEvent, HiddenEvent
from wakeful.probes.sources import Emit, EventSource, Visibility, visibility


class DecoderSource(EventSource):
    """Hooks a `Decoder`; its keys and values are what the value route made of them."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    @contextmanager
    def open(self, emit: Emit) -> Iterator[None]:
        valid: Tensor | None = None

        def enter(_module: nn.Module, _args: tuple, kwargs: dict[str, Any]) -> None:
            nonlocal valid
            if kwargs.get("cache") is not None:
                raise WakefulError("a watched forward takes whole sequences: leave out the cache")
            valid = kwargs.get("valid")

        def attention(layer: int):
            def hook(dot: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
                assert isinstance(dot, DotProduct)
                q, k, v = (heads.detach().transpose(1, 2) for heads in args)
                length = q.shape[2]
                if kwargs.get("copies", 1) != 1 or k.shape[2] != length:
                    raise WakefulError(
                        f"layer {layer} attends to other layers' keys as well as its own: its "
                        "weights are not one L × L matrix, so the probes do not apply"
                    )
                keep = kwargs.get("keep")
                if keep is None and dot.prefix > 1:
                    keep = causal_mask(length, length, dot.prefix, q.device)
                seen = Visibility() if keep is None else visibility(keep, valid, None)
                sink = dot.normalizer.log_sink()
                event = AttentionEvent(
                    layer,
                    q,
                    k,
                    v,
                    dot.scale,
                    keep=seen.keep,
                    valid=valid,
                    sink=None if sink is None else sink.detach(),
                )
                emit(event)

            return hook

        def before(_block: nn.Module, args: tuple) -> None:
            emit(HiddenEvent(-1, args[0].detach(), valid))

        def after(layer: int):
            def hook(_block: nn.Module, _args: tuple, output: tuple) -> None:
                emit(HiddenEvent(layer, output[0].detach(), valid))

            return hook

        with ExitStack() as hooks:
            hooks.callback(self.model.register_forward_pre_hook(enter, with_kwargs=True).remove)
            for layer, block in enumerate(self.model.blocks):
                if layer == 0:
                    hooks.callback(block.register_forward_pre_hook(before).remove)
                dots = [module for module in block.modules() if isinstance(module, DotProduct)]
                for dot in dots:
                    handle = dot.register_forward_pre_hook(attention(layer), with_kwargs=True)
                    hooks.callback(handle.remove)
                hooks.callback(block.register_forward_hook(after(layer)).remove)
            yield
