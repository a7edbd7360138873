"""Log-likelihoods of given tokens under any model that gives logits.

Shapes: B batch, L tokens, V vocabulary, C counted positions.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.loss import IGNORED
from wakeful.probes import running
from wakeful.probes.running import first_target, states_of
from wakeful.quant.linear import QuantizedLinear

_ROWS = 512
"""Logits taken to float32 at a time, to bound the copies of a large vocabulary."""


def log_likelihoods(
    model: nn.Module, inputs: Int[Tensor, "B L"], targets: Int[Tensor, "B L"]
) -> tuple[Float[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """Return log p(target | inputs up to it) in nats, and whether it is the likeliest token.

    A target of −100 is not counted: 0 and True. Rows may be padded at their end with any token,
    which no causal model's earlier positions see. In float32, or float64 where the model is; the
    answers are on the CPU.

    Raises:
        WakefulError: a logit is NaN.
    """
    likelihood = torch.zeros(targets.shape, dtype=torch.float64)
    greedy = torch.ones(targets.shape, dtype=torch.bool)
    states, head = states_of(model, inputs)
    if isinstance(head, QuantizedLinear) and head.sees_padding:  # its scale is of all positions
        states, head = head(states), nn.Identity()
    for row, (state, target) in enumerate(zip(states, targets, strict=True)):
        for places in torch.nonzero(target != IGNORED).flatten().split(_ROWS):
            logits = check_numbers(head(state[places]))
            logits = logits if logits.dtype == torch.float64 else logits.float()
            chosen = logits.gather(1, target[places, None])[:, 0]
            best = logits.argmax(1) == target[places]
            likelihood[row, places.cpu()] = (chosen - logits.logsumexp(1)).cpu().double()
            greedy[row, places.cpu()] = best.cpu()
    return likelihood, greedy


def check_numbers(logits: Tensor) -> Tensor:
    """Return the logits; raise `WakefulError` if one of them is NaN."""
    if logits.isnan().any():
        raise WakefulError(
            "the model's logits have a NaN: it is damaged, or needs --dtype float32 or float64"
        )
    return logits


def check_causal(name: str, model: nn.Module) -> None:
    """Raise `WakefulError` for a model some of whose tokens see what they are to predict."""
    running.check_causal(name, model)
    prefix = first_target(model)
    if prefix > 1:
        raise WakefulError(
            f"{name} has model.relaxed_prefix = {prefix}: its first tokens "
            "see their own targets, so it gives a text no likelihood; compare validation losses"
        )
