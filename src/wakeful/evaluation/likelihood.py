"""Log-likelihoods of given tokens under any model that gives logits.

Shapes: B batch, L tokens, V vocabulary, C counted positions.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.decoder import Decoder
from wakeful.model.loss import IGNORED

_ROWS = 512
"""Logits taken to float32 at a time, to bound the copies of a large vocabulary."""


def log_likelihoods(
    model: nn.Module, inputs: Int[Tensor, "B L"], targets: Int[Tensor, "B L"]
) -> tuple[Float[Tensor, "B L"], Bool[Tensor, "B L"]]:
    """Return log p(target | inputs up to it) in nats, and whether it is the likeliest token.

    A target of −100 is not counted: 0 and True. Rows may be padded at their end with any token,
    which no causal model's earlier positions see. In float32, or float64 where the model is.
    """
    likelihood = torch.zeros(targets.shape, dtype=torch.float64, device=targets.device)
    greedy = torch.ones(targets.shape, dtype=torch.bool, device=targets.device)
    if isinstance(model, Decoder):
        states, head = model.hidden(inputs), model.head
    else:
        states, head = model(input_ids=inputs, use_cache=False).logits, nn.Identity()
    for state, target, out, best in zip(states, targets, likelihood, greedy, strict=True):
        for places in torch.nonzero(target != IGNORED).flatten().split(_ROWS):
            logits = head(state[places])
            logits = logits if logits.dtype == torch.float64 else logits.float()
            chosen = logits.gather(1, target[places, None])[:, 0]
            out[places] = (chosen - logits.logsumexp(1)).double()
            best[places] = logits.argmax(1) == target[places]
    return likelihood, greedy


def check_causal(name: str, model: nn.Module) -> None:
    """Raise `WakefulError` for a decoder whose first tokens see what they are to predict."""
    if isinstance(model, Decoder) and model.config.relaxed_prefix > 1:
        raise WakefulError(
            f"{name} has model.relaxed_prefix = {model.config.relaxed_prefix}: its first tokens "
            "see their own targets, so it gives a text no likelihood; compare validation losses"
        )
