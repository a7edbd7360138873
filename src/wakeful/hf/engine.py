"""Attention by the kernels and the cache of an engine that runs models of Transformers: vLLM.

Its Transformers backend gives every layer a cache of its own and all tokens of a batch in one row.
It looks for one call of the attention interface a layer, and reads the layer's number, scale and
sinks off the module that makes it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from wakeful.errors import WakefulError
from wakeful.hf.configuration import WakefulConfig
from wakeful.model.attention import Attention, DotProduct, StoredPrefix
from wakeful.model.decoder import Decoder

ENGINES = ("vllm",)
"""The names by which engines ask for their own attention (`attn_implementation`)."""


class EngineDot(nn.Module):
    """One layer's attention over given heads, as an engine computes it.

    Sinks are the normalizer's, which only a checkpoint knows, so every pass hands them over. Of a
    stored token z, whose key and value are in no engine's cache, they take the place exactly:
    with k_z taken from every key, which takes q · k_z from every logit, z adds e^0 to the
    denominator, and with v_z taken from every value it adds v_z to the sum.
    """

    is_causal = True

    def __init__(self, config: WakefulConfig, layer: int, dot: DotProduct, *, sunk: bool) -> None:
        super().__init__()
        self.config = config
        self.layer_idx = layer
        self.normalizer = dot.normalizer
        self.scaling = dot.scale
        self.stored = 0
        self.kept: list[StoredPrefix] = []
        """Those of the stored key and of the stored value; a list, since others own them."""
        zeros = torch.zeros(config.num_attention_heads)
        self.sinks = nn.Parameter(zeros, requires_grad=False) if sunk or dot.stored else None

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "sinks":  # of no checkpoint, so that nobody waits for it
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, keep: Tensor | None, sink: Tensor | None
    ) -> Tensor:
        """Return attention (1, L, H, d) of tokens of several texts; the engine knows who sees whom,
        so `keep` says nothing new.
        """
        interface = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        key = value = None
        if self.kept:
            key, value = self.kept[0].keys, self.kept[1].values
            assert key is not None
            assert value is not None
            k, v = k - key, v - value
        if self.sinks is not None:
            self.sinks.copy_(torch.zeros_like(self.sinks) if sink is None else sink)
        out, _ = interface(
            self, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None,
            scaling=self.scaling, s_aux=self.sinks,
        )  # fmt: skip
        out = out.reshape(q.shape)
        if value is None:
            return out
        return out + value.repeat_interleave(q.shape[2] // k.shape[2], 1)


def use_engine_attention(decoder: Decoder, config: WakefulConfig) -> None:
    """Have an engine compute a decoder's attention, in place.

    Raises:
        WakefulError: it computes something else than the kernels of engines do.
    """
    attentions = [cast(Attention, block.get_submodule("attention")) for block in decoder.blocks]
    sunk = _check(decoder, attentions)
    for layer, attention in enumerate(attentions):
        dot = EngineDot(config, layer, attention.dot, sunk=sunk)
        if attention.dot.stored:
            source = decoder.plan.sources[layer]
            dot.kept = [attentions[source.key].stored, attentions[source.value].stored]
        attention.dot = dot  # pyright: ignore[reportAttributeAccessIssue]
    decoder.by_engine = True
    device = torch.get_default_device()  # where the engine computes: tables are made on the CPU
    for module in decoder.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _check(decoder: Decoder, attentions: Sequence[Attention]) -> bool:
    """Return whether the heads have sinks."""
    normalizer = attentions[0].dot.normalizer
    probe = decoder.embed.weight.new_zeros(1, 1, decoder.config.width)
    sink = normalizer.log_sink(probe) if normalizer.fused else None
    for why in _unlike_engines(decoder, attentions, sink):
        raise WakefulError(f"{why}, which no engine computes: run it by Transformers")
    return sink is not None


def _unlike_engines(
    decoder: Decoder, attentions: Sequence[Attention], sink: Tensor | None
) -> Iterator[str]:
    """Yield what the kernels of engines do not do."""
    config = decoder.config
    if not attentions[0].dot.normalizer.fused:
        yield f"model.normalizer = {config.normalizer} makes other weights than a softmax"
    if any(attention.attenders for attention in attentions):
        yield f"model.route = {config.route} attends in a way of its own"
    if config.relaxed_prefix > 1:
        yield f"model.relaxed_prefix = {config.relaxed_prefix} lets tokens see later ones"
    if sink is not None and sink.dim() > 1:
        yield f"model.normalizer = {config.normalizer} has a sink of every query's own"
    if any(attention.returns_null_share for attention in attentions):
        yield f"model.depth = {config.depth} reads what queries give to no key"
    if config.stored_prefix > 1 or (config.stored_prefix == 1 and sink is not None):
        yield (
            f"model.stored_prefix = {config.stored_prefix} and model.normalizer = "
            f"{config.normalizer} add more than one term to the denominator"
        )
