"""`learned_sinks`: one parameter per head replaces the token that collects the attention.

What `absorb` leaves of a stored token z is its key: taking q_i · k_z from every logit makes keys
k_j − k_z and a 1 = e^s in the denominator, which is softmax-1 with a sink s = 0 (From Attention to
Activation, eq. 1). A shift of all keys is a bias of their projection: the model with z before every
text, exactly, without z.

RoPE turns a key's bias b into R_j b, at every place j another. The b with the least
Σ_j ‖R_j b − k_z‖² is the mean of R_j⁻¹ k_z: channels that turn slowly keep k_z, fast ones, which
cannot tell z from afar, lose it. What is lost is put into s in the mean: s gives the sink, over a
text, the weight that z had. Queries and keys that are normalized after their projection get no
shift, and s alone.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from wakeful.model.decoder import Decoder
from wakeful.model.positions import turn_pairs
from wakeful.surgery.absorb import RecordedAttention, absorb, check_replaceable, solve_sink

NORMALIZER = "softmax1(learned=True)"


@torch.no_grad()
def learned_sinks(decoder: Decoder, token: int, text: Int[Tensor, "B L"]) -> Decoder:
    """Return a decoder with learned sinks whose logits are nearly those of `decoder` after `token`.

    With k_z and v_z the token's key and value, keys become k_j − k_z and values v_j − v_z, and the
    denominator of the softmax gets e^s, s = 0. Without rotary positions and normalized keys this is
    the same function. RoPE rotates the shift of the keys, so there the mean shift over positions is
    taken, and s chosen so that the sink gets the token's mean weight on `text`. All weights but the
    attention's biases are shared with `decoder`, which is not changed.

    Args:
        decoder: of an ordinary softmax and route.
        token: id of the token that the sinks replace, as if it stood before every sequence.
        text: sequences to fit the sinks on.

    Raises:
        WakefulError: the decoder has another softmax or route, hides or stores tokens, or lacks the
            token.
    """
    check_replaceable(decoder)

    def learn(recorded: RecordedAttention) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the change of a layer's key bias, and its sinks s (H,) by their name."""
        token_key = recorded.k[:1, :1]
        shift, rotated_shift = _key_shift(decoder, recorded.layer, token_key, text.shape[1])
        token_logits, rest = recorded.first_and_rest()
        _, shifted_rest = recorded.first_and_rest(rotated_shift)
        sinks = solve_sink(shifted_rest, (token_logits - rest).sigmoid())
        name = f"blocks.{recorded.layer}.attention.dot.normalizer.log_sinks"
        return -shift.flatten(), {name: sinks}

    return absorb(decoder, token, text, learn, normalizer=NORMALIZER)


def _key_shift(
    decoder: Decoder, layer: int, key: Float[Tensor, "1 1 G d"], length: int
) -> tuple[Float[Tensor, "1 1 G d"], Float[Tensor, "1 L G d"]]:
    """Return the vector to subtract from all keys before RoPE, and that vector as RoPE rotates it
    at each of the positions 1 … L.

    It is the stored token's `key` without RoPE; with RoPE that key, rotated by the mean of the
    inverse rotations; and zero where keys are normalized after their projection.
    """
    rotated_shape = (1, length, *key.shape[2:])
    if decoder.config.qk_norm:
        shift = torch.zeros_like(key)
        return shift, shift.expand(rotated_shape)
    rope_name = decoder.config.rope_table_name(layer)
    if not rope_name:
        return key, key.expand(rotated_shape)
    cos, sin = decoder.get_submodule(rope_name)(slice(1, length + 1))
    mean_inverse = cos.mean(0, keepdim=True), -sin.mean(0, keepdim=True)
    shift = turn_pairs(key, mean_inverse)
    return shift, turn_pairs(shift.expand(rotated_shape), (cos, sin))
