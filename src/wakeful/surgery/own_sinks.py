"""`fit_own_sinks`: what `learned_sinks` does, with the sinks that a gpt-oss has already.

Its heads are softmax-1 with a sink s each, and a mixture of experts, which our decoder is not. So
attention is read on Transformers' modules, with a token z before a text, and the parameters that
are there are set. A query gives z the weight p_z and its own sink p_s; both together become the
weight of the new sink, and ν v_z, with ν = Σ p_z / Σ (p_z + p_s) over a text, its value:

    u_i = Σ_j p_ij v_j + p_iz v_z ≈ ν v_z + Σ_j p_ij (v_j − ν v_z).

Keys are shifted as `learned_sinks` shifts them.
"""

import copy
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.gpt_oss.modeling_gpt_oss import apply_rotary_pos_emb

from wakeful.errors import WakefulError
from wakeful.probes.base import SCHEMA, AttentionEvent, Frame, Probe
from wakeful.probes.running import logits_of
from wakeful.probes.watch import watch
from wakeful.surgery.absorb import first_and_rest_logits, solve_sink
from wakeful.surgery.sink_tokens import prepend_tokens


class _AttentionEvents(Probe):
    """Each layer's queries, keys and values of all sequences; it measures nothing, so that its
    table has no rows.
    """

    def __init__(self) -> None:
        self.events: dict[int, list[AttentionEvent]] = {}

    def see_attention(self, event: AttentionEvent) -> None:
        self.events.setdefault(event.layer, []).append(event)

    def rows(self) -> Frame:
        return Frame(schema=SCHEMA)


def check_own_sinks(model: nn.Module) -> None:
    """Raise `WakefulError` where a mixture of experts has no sinks that could be set."""
    config = getattr(model, "config", None)
    if getattr(config, "model_type", "") != "gpt_oss":
        raise WakefulError("of the classes with experts, only gpt-oss has sinks of its own")
    if not getattr(config, "attention_bias", False):
        raise WakefulError(
            "attention_bias is false, and the value of the token goes into those biases"
        )


@torch.no_grad()
def fit_own_sinks(model: PreTrainedModel, token: int, text: Int[Tensor, "B L"]) -> PreTrainedModel:
    """Return a copy of a gpt-oss model whose sinks replace a `token` stored before each text.

    Its outputs are nearly those of `model` with that token first. All weights but the sinks and the
    biases of the attention are shared with `model`, which is not changed. Only the beginning of a
    sequence longer than the sliding window is used.

    Raises:
        WakefulError: the model has no such sinks.
    """
    check_own_sinks(model)
    length = text.shape[1]
    if model.config.sliding_window:  # which the token and the text have to fit into
        length = min(length, model.config.sliding_window - 1)
    recorded = _AttentionEvents()
    with watch(model, recorded):
        for row in text[:, :length]:
            logits_of(model, prepend_tokens((token,), row[None]))
    shared = {id(parameter): parameter for parameter in model.parameters()}
    fitted: Any = copy.deepcopy(model, shared).eval()
    rotary = fitted.model.rotary_emb
    positions = torch.arange(1, length + 1, device=text.device)[None]
    cos_sin = rotary(torch.zeros(1, device=text.device), positions)
    for layer, events in recorded.events.items():
        attention = fitted.model.layers[layer].self_attn
        _set_sinks(attention, events, cos_sin, rotary.attention_scaling)
    return fitted


def _set_sinks(
    attention: Any,
    events: list[AttentionEvent],
    cos_sin: tuple[Tensor, Tensor],
    attention_scaling: float,
) -> None:
    """Set one layer's sinks and biases so that they replace the token's key and value.

    `events` are the layer's attention on each sequence, the token first, and `cos_sin` those of
    RoPE at the positions after it; RoPE multiplies keys by `attention_scaling` too.
    """
    q = torch.cat([event.q for event in events]).transpose(1, 2)
    k = torch.cat([event.k for event in events]).transpose(1, 2)
    num_groups, scale = k.shape[2], events[0].scale
    cos, sin = cos_sin
    token_key = k[:1, :1].expand(-1, cos.shape[1], -1, -1)
    # The mean of the inverse rotations; both they and the key have the scaling as a factor.
    inverse = _apply_rope(token_key, cos, -sin) / attention_scaling**2
    shift_before_rope = inverse.mean(1, keepdim=True)
    shift = _apply_rope(shift_before_rope.expand_as(token_key), cos, sin)
    token_logits, rest = first_and_rest_logits(q[:, 1:], k, scale).movedim(0, 2).flatten(2)
    _, shifted_rest = first_and_rest_logits(q[:, 1:], k, scale, shift).movedim(0, 2).flatten(2)
    own_sinks = attention.sinks.double()[:, None].expand_as(token_logits)
    # The new sink takes the weight of the token and of the own sink together, p_z + p_s.
    both_logits = torch.logaddexp(token_logits, own_sinks)
    both_weights = (both_logits - rest).sigmoid()
    token_weights = (token_logits - both_logits).exp() * both_weights
    token_share = token_weights.sum(1) / both_weights.sum(1)  # ν (H,), a mean over heads of a group
    value = events[0].v[0, :, 0]
    value = value * token_share.view(num_groups, -1).mean(1, keepdim=True).to(q.dtype)
    value_of_heads = value.repeat_interleave(len(token_share) // num_groups, 0).flatten()
    _add_to_bias(attention.k_proj, -shift_before_rope.flatten())
    _add_to_bias(attention.v_proj, -value.flatten())
    _add_to_bias(attention.o_proj, attention.o_proj.weight @ value_of_heads)
    sinks = solve_sink(shifted_rest, both_weights)
    attention.sinks = _parameter(sinks.to(attention.sinks.dtype))


def _apply_rope(
    keys: Float[Tensor, "1 L G d"], cos: Float[Tensor, "1 L r"], sin: Float[Tensor, "1 L r"]
) -> Float[Tensor, "1 L G d"]:
    """Return the keys rotated by gpt-oss's own function, which takes queries too: its first result
    is left out.
    """
    return apply_rotary_pos_emb(
        keys, keys, cos.to(keys.dtype), sin.to(keys.dtype), unsqueeze_dim=2
    )[1]


def _add_to_bias(linear: nn.Linear, bias: Tensor) -> None:
    linear.bias = _parameter(linear.bias + bias.to(linear.bias.dtype))


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
