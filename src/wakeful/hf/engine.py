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
    """One layer's dot-product attention, computed by an inference engine (vLLM).

    The engine gets the normalizer's sinks at every forward pass, since their values come with the
    checkpoint. A stored prefix token z, whose key and value are not in the engine's cache, is
    expressed exactly as a sink: subtracting k_z from every key subtracts q · k_z from every logit,
    so that z adds e^0 to the denominator, and subtracting v_z from every value adds v_z to the sum.
    """

    is_causal = True

    def __init__(
        self, config: WakefulConfig, layer: int, dot: DotProduct, *, has_sinks: bool
    ) -> None:
        """Take the scale and normalizer of `dot`, the attention of the layer with the number
        `layer`. The engine gets a sink per head if the normalizer has sinks (`has_sinks`) or the
        layer has a stored prefix.
        """
        super().__init__()
        self.config = config
        self.layer_idx = layer
        self.normalizer = dot.normalizer
        self.scaling = dot.scale
        self.stored = 0
        """Tokens of a stored prefix among the keys: none, since the prefix is a sink here."""
        self.prefixes: list[StoredPrefix] = []
        """The modules with the stored key and with the stored value; a list, so that they are not
        registered twice."""
        zeros = torch.zeros(config.num_attention_heads)
        self.sinks = nn.Parameter(zeros, requires_grad=False) if has_sinks or dot.stored else None

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute, but do not register `sinks` as a parameter: no checkpoint has it."""
        if name == "sinks":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, keep: Tensor | None, sink: Tensor | None
    ) -> Tensor:
        """Return attention (1, L, H, d) from q (1, L, H, d) and k, v (1, L, G, d); one row holds
        the tokens of all texts of a batch.

        `sink` is the logarithm of the normalizer's sinks, None without. The engine has its own
        mask, so that `keep` is ignored. A stored prefix token z is computed as a sink: with k_z
        subtracted from every key it adds e^0 to the denominator, and with v_z subtracted from every
        value, v_z is added to the output.
        """
        interface = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        key = value = None  # k_z and v_z of a stored prefix
        if self.prefixes:
            key, value = self.prefixes[0].keys, self.prefixes[1].values
            assert key is not None
            assert value is not None
            k, v = k - key, v - value
        if self.sinks is not None:
            # Without a sink of the normalizer there is a stored prefix, which adds e^0.
            self.sinks.copy_(torch.zeros_like(self.sinks) if sink is None else sink)
        out, _ = interface(
            self, q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), None,
            scaling=self.scaling, s_aux=self.sinks,
        )  # fmt: skip
        out = out.reshape(q.shape)
        if value is None:
            return out
        # Each head of keys and values serves H / G heads of queries.
        return out + value.repeat_interleave(q.shape[2] // k.shape[2], 1)


def use_engine_attention(decoder: Decoder, config: WakefulConfig) -> None:
    """Replace the attention of a decoder's layers, in place, by calls of an inference engine, and
    move the decoder's buffers to the default device, where the engine computes.

    Raises:
        WakefulError: the decoder's attention is another function than engines compute.
    """
    attentions = [cast(Attention, block.get_submodule("attention")) for block in decoder.blocks]
    has_sinks = _check_engine_support(decoder, attentions)
    for layer, attention in enumerate(attentions):
        dot = EngineDot(config, layer, attention.dot, has_sinks=has_sinks)
        if attention.dot.stored:  # tokens of a stored prefix
            # A layer may read the keys or values of other layers, and with them their prefix.
            source = decoder.plan.sources[layer]
            dot.prefixes = [attentions[source.key].stored, attentions[source.value].stored]
        attention.dot = dot  # pyright: ignore[reportAttributeAccessIssue]
    decoder.by_engine = True
    device = torch.get_default_device()  # tables are made on the CPU
    for module in decoder.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module._buffers[name] = buffer.to(device)


def _check_engine_support(decoder: Decoder, attentions: Sequence[Attention]) -> bool:
    """Check that inference engines can compute a decoder's attention; return whether its normalizer
    has sinks.

    Raises:
        WakefulError: a part of the attention is not in the engines' kernels.
    """
    normalizer = attentions[0].dot.normalizer  # all layers have the same kind
    one_token = decoder.embed.weight.new_zeros(1, 1, decoder.config.width)  # only its shape counts
    sink = normalizer.log_sink(one_token) if normalizer.fused else None
    for problem in _find_engine_problems(decoder, attentions, sink):
        raise WakefulError(f"{problem}, which no engine computes: run it by Transformers")
    return sink is not None


def _find_engine_problems(
    decoder: Decoder, attentions: Sequence[Attention], sink: Tensor | None
) -> Iterator[str]:
    """Yield a sentence for each part of a decoder's attention that engines' kernels cannot compute.

    `sink` is the logarithm of the normalizer's sinks, (H,) or with more axes if it depends on the
    query; None without sinks.
    """
    config = decoder.config
    if not attentions[0].dot.normalizer.fused:  # neither a softmax nor one with a sink
        yield f"model.normalizer = {config.normalizer} makes other weights than a softmax"
    if any(attention.attenders for attention in attentions):  # value routes that replace attention
        yield f"model.route = {config.route} attends in a way of its own"
    if sink is not None and sink.dim() > 1:
        yield f"model.normalizer = {config.normalizer} has another sink for every query"
    # A kernel has one sink per head: one stored token or the normalizer's sink, not both.
    if config.stored_prefix > 1 or (config.stored_prefix == 1 and sink is not None):
        yield (
            f"model.stored_prefix = {config.stored_prefix} and model.normalizer = "
            f"{config.normalizer} add more than one term to the denominator"
        )
