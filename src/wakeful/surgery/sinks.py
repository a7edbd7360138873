"""`learned_sinks`: a parameter a head in the place of the token where attention parks.

With a token z stored before the text, keys k_z and values v_z, a head of an ordinary softmax gives

    u_i = Σ_j p_ij v_j + p_iz v_z = v_z + Σ_j p_ij (v_j − v_z),
    p_ij = e^{q_i · k_j} / (e^{q_i · k_z} + Σ_j e^{q_i · k_j}).

Taking q_i · k_z from every logit leaves z out of the sums: keys k_j − k_z, values v_j − v_z, and a
1 = e^s in the denominator, which is softmax-1 with a sink s = 0 (From Attention to Activation,
eq. 1). Shifts of all keys and all values are biases of their projections, and v_z, turned by the
output projection, is a bias of that: the model with z before every text, exactly, without z.

RoPE turns a key's bias b into R_j b, at every place j another. The b with the least
Σ_j ‖R_j b − k_z‖² is the mean of R_j⁻¹ k_z: channels that turn slowly keep k_z, fast ones, which
cannot tell z from afar, lose it. What is lost is put into s in the mean: s gives the sink, over a
text, the weight that z had. Queries and keys that are normalized after their projection get no
shift, and s alone.
"""

from functools import partial
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.attend import causal_mask
from wakeful.model.attention import DotProduct
from wakeful.model.block import Block
from wakeful.model.decoder import Decoder
from wakeful.model.positions import rotate
from wakeful.surgery.prefix import store_prefix
from wakeful.surgery.rebuild import rebuilt

NORMALIZER = "softmax1(learned=True)"
_SMALLEST = 1e-6
"""The least mean weight of a sink: that of none has no logarithm."""


def check_sinks(decoder: Decoder) -> None:
    """Raise `WakefulError` where a model cannot have learned sinks put in."""
    config = decoder.config
    for field, wanted in (("normalizer", "softmax"), ("route", "own")):
        found = getattr(config, field)
        if found != wanted:
            raise WakefulError(
                f"model.{field} = {found}: learned sinks are put into models whose {field} is "
                f"{wanted}"
            )
    if config.relaxed_prefix > 1:
        raise WakefulError("model.relaxed_prefix: its first tokens attend as no sink can stand for")


@torch.no_grad()
def learned_sinks(decoder: Decoder, token: int, text: Int[Tensor, "B L"]) -> Decoder:
    """Return a decoder with learned sinks that reads a text nearly as `decoder` after `token`.

    Without rotary positions and normalized keys it is that function exactly. All weights but those
    of the attention's biases are shared with `decoder`, which stays as it is.

    Args:
        decoder: with the ordinary softmax over each layer's own keys and values.
        token: stands before every sequence in what the sinks are made of.
        text: sequences to take the sinks' weights from.

    Raises:
        WakefulError: another normalizer or route, a stored prefix, or a token that is none.
    """
    check_sinks(decoder)
    prefixed = store_prefix(decoder, [token])
    shape = decoder.config.shape
    new: dict[str, Tensor] = {}

    def see(layer: int, dot: DotProduct, heads: tuple[Tensor, Tensor, Tensor]) -> None:
        q, k, v = heads
        attention = cast(Block, decoder.blocks[layer]).attention
        shift, turned = _shift(decoder, k[:1, :1], text.shape[1])
        sink = _sink(q, k, turned, dot.scale)
        value = v[0, 0]
        repeated = value.repeat_interleave(shape.num_heads // shape.num_kv_heads, 0).flatten()
        name = f"blocks.{layer}.attention"
        added = {
            "query": 0.0,
            "key": -shift.flatten(),
            "value": -value.flatten(),
            "out": attention.out.weight @ repeated,
        }
        for part, bias in added.items():
            linear = cast(nn.Linear, attention.get_submodule(part))
            old = linear.bias
            old = linear.weight.new_zeros(len(linear.weight)) if old is None else old
            new[f"{name}.{part}.bias"] = old.detach() + bias
        new[f"{name}.dot.normalizer.log_sinks"] = sink.to(q.dtype)

    hooks = [
        cast(Block, block).attention.dot.register_forward_pre_hook(partial(see, layer))
        for layer, block in enumerate(prefixed.blocks)
    ]
    try:
        prefixed.hidden(text)
    finally:
        for hook in hooks:
            hook.remove()
    if decoder.config.positions == "learned":
        new["positions.weight"] = decoder.positions.weight.detach()[1:].clone()
    return rebuilt(
        decoder, new, normalizer=NORMALIZER, attention_bias="all",
        max_length=decoder.config.max_length - 1,
    )  # fmt: skip


def _shift(
    decoder: Decoder, key: Float[Tensor, "1 1 G d"], length: int
) -> tuple[Float[Tensor, "1 1 G d"], Float[Tensor, "1 L G d"]]:
    """Return what to take from all keys before RoPE, and what that is after it at places 1 … L."""
    places = (1, length, *key.shape[2:])
    if decoder.config.qk_norm:
        shift = torch.zeros_like(key)
        return shift, shift.expand(places)
    if decoder.config.positions != "rotary":
        return key, key.expand(places)
    cos, sin = decoder.rotary(slice(1, length + 1))
    back = cos.mean(0, keepdim=True), -sin.mean(0, keepdim=True)
    shift = rotate(key, back)
    return shift, rotate(shift.expand(places), (cos, sin))


def _sink(
    q: Float[Tensor, "B L H d"],
    k: Float[Tensor, "B P G d"],
    turned: Float[Tensor, "1 L G d"],
    scale: float,
) -> Float[Tensor, "H"]:
    """Return s with mean σ(s − l'_i) = mean σ(a_i − l_i), over sequences and queries i.

    a_i is the first key's logit, l_i the log-sum-exp of those of the others that i sees, and l'_i
    the same of keys that are shifted.
    """
    repeats = q.shape[2] // k.shape[2]
    seen = causal_mask(q.shape[1], q.shape[1], 0, q.device)
    wanted, ends = [], []
    for queries, keys in zip(q, k, strict=True):
        logits = _logits(queries, keys, repeats, scale)
        text = logits[..., 1:].masked_fill(~seen, -torch.inf).logsumexp(-1)
        wanted.append((logits[..., 0] - text).sigmoid())
        shifted = _logits(queries, keys[1:] - turned[0], repeats, scale)
        ends.append(shifted.masked_fill(~seen, -torch.inf).logsumexp(-1))
    mean = torch.cat(wanted, 1).mean(1, keepdim=True).clamp(_SMALLEST, 1 - _SMALLEST)
    end = torch.cat(ends, 1)
    # Where every l' were equal, s would be that plus the weight's log-odds: it lies in between.
    low, high = (bound + mean.logit() for bound in end.aminmax(dim=1, keepdim=True))
    for _ in range(60):
        middle = (low + high) / 2
        less = (middle - end).sigmoid().mean(1, keepdim=True) < mean
        low, high = torch.where(less, middle, low), torch.where(less, high, middle)
    return ((low + high) / 2).squeeze(1)


def _logits(queries: Tensor, keys: Tensor, repeats: int, scale: float) -> Tensor:
    """Return all logits (H, L, S) of one sequence in float64."""
    spread = keys.repeat_interleave(repeats, dim=1).double()
    return torch.einsum("lhd,shd->hls", queries.double(), spread) * scale
