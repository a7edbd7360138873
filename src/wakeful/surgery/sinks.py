"""`learned_sinks`: one parameter per head replaces the token that collects the attention.

With a token z stored before the text, keys k_z and values v_z, a head of an ordinary softmax gives

    u_i = Σ_j p_ij v_j + p_iz v_z = v_z + Σ_j p_ij (v_j − v_z),
    p_ij = e^{q_i · k_j} / (e^{q_i · k_z} + Σ_j e^{q_i · k_j}).

A shift of all values is a bias of their projection, and v_z, turned by the output projection, is a
bias of that. What is left of z is its key: taking q_i · k_z from every logit makes keys k_j − k_z
and a 1 = e^s in the denominator, which is softmax-1 with a sink s = 0 (From Attention to
Activation, eq. 1). A shift of all keys is a bias of their projection: the model with z before every
text, exactly, without z.

RoPE turns a key's bias b into R_j b, at every place j another. The b with the least
Σ_j ‖R_j b − k_z‖² is the mean of R_j⁻¹ k_z: channels that turn slowly keep k_z, fast ones, which
cannot tell z from afar, lose it. What is lost is put into s in the mean: s gives the sink, over a
text, the weight that z had. Queries and keys that are normalized after their projection get no
shift, and s alone.
"""

from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.attend import causal_mask
from wakeful.model.decoder import Decoder
from wakeful.model.hooks import hooked
from wakeful.model.positions import turn_pairs
from wakeful.model.rebuild import rebuild_decoder
from wakeful.surgery.prefix import store_prefix

NORMALIZER = "softmax1(learned=True)"
_SMALLEST = 1e-6
"""Least mean weight, so that its logarithm is finite."""


def check_replaceable(decoder: Decoder) -> None:
    """Raise `WakefulError` if learned sinks cannot take the place of a token before the text: the
    model has another normalizer or route, a sliding window, or a stored prefix.
    """
    config = decoder.config
    for field, required in (("normalizer", "softmax"), ("route", "own")):
        actual = getattr(config, field)
        if actual != required:
            raise WakefulError(
                f"model.{field} = {actual}: sinks are put into models whose {field} is {required}"
            )
    if config.has_short_window:
        raise WakefulError(
            f"model.window = {config.window}: sinks stand for one token that every layer sees; "
            "--prefix auto stores one that no window hides"
        )
    if config.stored_prefix:
        raise WakefulError(
            f"model.stored_prefix = {config.stored_prefix}: sinks stand for one token before a "
            "text, and this model stores some already"
        )


@torch.no_grad()
def learned_sinks(decoder: Decoder, token: int, text: Int[Tensor, "B L"]) -> Decoder:
    """Return a decoder with learned sinks whose logits are nearly those of `decoder` after `token`.

    With k_z and v_z the token's key and value, keys become k_j − k_z and values v_j − v_z, the
    output's bias gets W_o v_z, and e^s, s = 0, is added to the denominator of the softmax. In a
    model with neither rotary positions nor normalized keys this is the same function. RoPE rotates
    the shift of the keys; there the shift is the mean over positions, and s is chosen so that the
    sink has the token's mean weight on `text`. Normalized keys are not shifted, and s is chosen
    likewise. All weights but the attention's biases and learned positions are shared with
    `decoder`, which is not changed; the context is one token shorter.

    Args:
        decoder: a decoder with softmax and the plain value route.
        token: id of the token that the sinks replace, as if it stood before every sequence.
        text: sequences to fit the sinks on.

    Raises:
        WakefulError: the decoder has another softmax or route, hides or stores tokens, or lacks the
            token.
    """
    check_replaceable(decoder)
    prefixed = store_prefix(decoder, [token])
    attentions = {layer: block.attention for layer, block in enumerate(prefixed.blocks)}
    shape = decoder.config.shape
    tensors: dict[str, Tensor] = {}

    def replace_token(layer: int, heads: tuple[Any, ...]) -> None:
        """Set a layer's sinks and biases. `heads` are its queries, keys and values; the token's key
        and value come first.
        """
        q, k, v = heads
        attention = attentions[layer]
        shift, rotated_shift = _key_shift(decoder, layer, k[:1, :1], text.shape[1])
        token_logits, rest = first_and_rest_logits(q, k, attention.dot.scale)
        _, shifted_rest = first_and_rest_logits(q, k, attention.dot.scale, rotated_shift)
        sinks = solve_sink(shifted_rest, (token_logits - rest).sigmoid())
        tensors[f"blocks.{layer}.attention.dot.normalizer.log_sinks"] = sinks.to(q.dtype)
        token_value = v[0, 0]
        num_repeats = shape.num_heads // shape.num_kv_heads
        value_of_heads = token_value.repeat_interleave(num_repeats, 0).flatten()
        changes_of_bias = {
            "query": 0.0,  # not changed, but with attention_bias="all" it has to be there
            "key": -shift.flatten(),
            "value": -token_value.flatten(),
            "out": attention.out.weight @ value_of_heads,
        }
        for part, change in changes_of_bias.items():
            linear = cast(nn.Linear, attention.get_submodule(part))
            bias = linear.bias
            if bias is None:
                bias = linear.weight.new_zeros(len(linear.weight))
            tensors[f"blocks.{layer}.attention.{part}.bias"] = bias.detach() + change

    # One forward pass calls `replace_token` with every layer's heads.
    dots = {layer: attention.dot for layer, attention in attentions.items()}
    with hooked(dots, before=replace_token):
        prefixed.hidden(text)
    # The text keeps the positions that it had after the token.
    if decoder.config.positions == "learned":
        tensors["positions.weight"] = decoder.positions.weight.detach()[1:].clone()
    max_length = decoder.config.max_length - 1
    return rebuild_decoder(
        decoder, tensors, attention_bias="all", max_length=max_length, normalizer=NORMALIZER
    )


def first_and_rest_logits(
    q: Float[Tensor, "B L H d"],
    k: Float[Tensor, "B P G d"],
    scale: float,
    shift: "Float[Tensor, '#1 L G d'] | None" = None,
) -> tuple[Float[Tensor, "H N"], Float[Tensor, "H N"]]:
    """Return (the logit of the first key, the log-sum-exp of the logits of the other keys that a
    query sees), for each head and each of N = B · L queries, in float64.

    There is one key more than there are queries, P = L + 1: query i, from 0, sees the first key and
    the i + 1 keys after it. `shift` is subtracted from the keys after the first.
    """
    repeats, length = q.shape[2] // k.shape[2], q.shape[1]
    unseen = ~causal_mask(length, length, q.device)  # among the keys after the first
    firsts, rests = list[Tensor](), list[Tensor]()
    for queries, keys in zip(q.double(), k.double(), strict=True):  # one sequence, to save memory
        shifted = keys if shift is None else torch.cat([keys[:1], keys[1:] - shift[0]])
        keys_of_heads = shifted.repeat_interleave(repeats, dim=1)
        logits = torch.einsum("lhd,shd->hls", queries, keys_of_heads) * scale
        firsts.append(logits[..., 0])
        rests.append(logits[..., 1:].masked_fill(unseen, -torch.inf).logsumexp(-1))
    return torch.cat(firsts, 1), torch.cat(rests, 1)


def solve_sink(logits: Float[Tensor, "H N"], weights: Float[Tensor, "H N"]) -> Float[Tensor, "H"]:
    """Return for each head the sink s whose mean weight over queries is the mean of `weights`:
    mean σ(s − logits) = mean weights, solved by bisection.

    `logits` are, for each query, the log-sum-exp of the logits of all keys.
    """
    mean_weight = weights.mean(1, keepdim=True).clamp(_SMALLEST, 1 - _SMALLEST)
    # If all logits were equal, s would be that number plus the mean weight's log-odds. So it lies
    # between the sums for the smallest and the largest logit.
    smallest, largest = logits.aminmax(dim=1, keepdim=True)
    low, high = smallest + mean_weight.logit(), largest + mean_weight.logit()
    for _ in range(60):  # halves the interval to less than rounding
        middle = (low + high) / 2
        too_small = (middle - logits).sigmoid().mean(1, keepdim=True) < mean_weight
        low, high = torch.where(too_small, middle, low), torch.where(too_small, high, middle)
    return ((low + high) / 2).squeeze(1)


def _key_shift(
    decoder: Decoder, layer: int, key: Float[Tensor, "1 1 G d"], length: int
) -> tuple[Float[Tensor, "1 1 G d"], Float[Tensor, "1 L G d"]]:
    """Return (the vector to subtract from all keys before RoPE, that vector as RoPE rotates it at
    each of the positions 1 … L, which are the text's after the stored token).

    The vector is the stored token's `key` in a model without RoPE. With RoPE it is the mean over
    positions of the key rotated back. If keys are normalized after their projection, where nothing
    can be subtracted from them, it is zero.
    """
    rotated_shape = (1, length, *key.shape[2:])
    if decoder.config.qk_norm:
        shift = torch.zeros_like(key)
        return shift, shift.expand(rotated_shape)
    rope_name = decoder.config.rope_table_name(layer)
    if not rope_name:
        return key, key.expand(rotated_shape)
    cos, sin = decoder.get_submodule(rope_name)(slice(1, length + 1))
    mean_inverse = cos.mean(0, keepdim=True), -sin.mean(0, keepdim=True)  # −sin rotates back
    shift = turn_pairs(key, mean_inverse)
    return shift, turn_pairs(shift.expand(rotated_shape), (cos, sin))
