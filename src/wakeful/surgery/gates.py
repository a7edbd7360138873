"""`learned_gates` and `open_gates`: a gate on every head's output.

What `absorb` leaves of a stored token z is its weight. With p̂ the softmax over the text alone,
p_ij = (1 − p_iz) p̂_ij, so a gate g_i = 1 − p_iz does what z did:

    u_i = v_z + g_i Σ_j p̂_ij (v_j − v_z),   ln g_i / (1 − g_i) = ln Σ_j e^{q_i · k_j} − q_i · k_z.

The log-odds are nearly a linear function of the attention's input, which the gate's weights are
fitted to by ridge regression over a text; its bias gives it the mean that it should have. Shifts of
keys change nothing in p̂, so rotary positions do no harm.
"""

import sys

import torch
from jaxtyping import Int
from torch import Tensor

from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.model.rebuild import rebuild_decoder
from wakeful.surgery.absorb import RecordedAttention, absorb, check_replaceable, solve_sink

ROUTE = "output_gate"
_RIDGE = 0.1
"""Added to the inputs' covariance, in its mean diagonal."""
_FURTHEST = 8.0
"""Log-odds past this are not followed further: a gate is open or shut there."""


@torch.no_grad()
def learned_gates(decoder: Decoder, token: int, text: Int[Tensor, "B L"]) -> Decoder:
    """Return a decoder with gates whose logits are nearly those of `decoder` after `token`.

    Each head's output is multiplied by g_i = 1 − p_iz, the attention that the token z leaves to the
    text; its log-odds are fitted as a linear function of the attention's input by ridge regression.

    All weights but those of the attention's biases are shared with `decoder`, which stays as it is.

    Args:
        decoder: with the ordinary softmax over each layer's own keys and values.
        token: token that stands before every sequence while the gates are fitted.
        text: sequences to fit the gates on.

    Raises:
        WakefulError: another normalizer or route, a stored prefix, or a token that is none.
    """
    check_replaceable(decoder, "gates")

    def learn(recorded: RecordedAttention) -> tuple[float, dict[str, Tensor]]:
        first, rest = recorded.first_and_rest()
        odds = rest - first  # (H, N)
        x = recorded.inputs()
        target = odds.clamp(-_FURTHEST, _FURTHEST).T
        centered = x - x.mean(0)
        covariance = centered.T @ centered
        ridge = _RIDGE * covariance.diagonal().mean()
        covariance.diagonal().add_(ridge.clamp_min(sys.float_info.min))  # all x may be alike
        weight = torch.linalg.solve(covariance, centered.T @ (target - target.mean(0))).T
        bias = solve_sink(-(weight @ x.T), odds.sigmoid())
        name = f"route.gates.{recorded.layer}"
        return 0.0, {f"{name}.weight": weight, f"{name}.bias": bias}

    return absorb(decoder, token, text, learn, route=ROUTE)


@torch.no_grad()
def open_gates(decoder: Decoder) -> Decoder:
    """Return a decoder with gates and the same logits, to the bit.

    Every gate is sigmoid(0) = ½, where it learns fastest, and the output projection twice what it
    was. All other weights are shared with `decoder`, which stays as it is.

    Raises:
        WakefulError: the model has a route already.
    """
    config = decoder.config
    if config.route != "own":
        raise WakefulError(
            f"model.route = {config.route}: gates are put into models whose route is own"
        )
    heads, width = config.shape.num_heads, config.width
    embedding = decoder.embed.weight
    new: dict[str, Tensor] = {}
    for layer in range(config.num_layers):
        new[f"route.gates.{layer}.weight"] = embedding.new_zeros(heads, width)
        new[f"route.gates.{layer}.bias"] = embedding.new_zeros(heads)
        out = f"blocks.{layer}.attention.out.weight"
        new[out] = 2 * decoder.get_parameter(out).detach()
    return rebuild_decoder(decoder, new, route=ROUTE)
