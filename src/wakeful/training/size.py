"""The arithmetic of training on one token."""

from wakeful.config.model import ModelConfig
from wakeful.model.decoder import Decoder
from wakeful.variants.roles import role_of


def operations_of(model: ModelConfig, num_multiplied: int, length: int) -> float:
    """Return the floating-point operations of training a decoder on one token.

    They are 6 for each of the `num_multiplied` parameters of matrix products, 2 forward and 4
    backward. Causal attention adds 6 L H d a layer, with H heads of d channels and rows of
    L = `length` tokens: a query meets L / 2 keys in the mean, each costs 2 H d in the logits and
    2 H d in the output, and the backward pass takes twice the forward one. In a window of w tokens
    the mean is w (1 − w / 2 L) keys. What else a route, a norm or an optimizer computes is not
    counted. It is the arithmetic of docs/distributed.md.
    """
    shape = model.shape
    keys_per_query = 0.0  # the mean over queries, summed over layers
    for layer in range(model.num_layers):
        local = model.window if layer in model.local_layers else 0
        window = min(local or length, length)
        keys_per_query += window * (1 - window / (2 * length))
    attention = 12.0 * keys_per_query * shape.num_heads * shape.head_width
    return 6.0 * num_multiplied + attention


def count_multiplied(decoder: Decoder) -> int:
    """Return the number of parameters used in matrix products: all but the tables in which tokens
    and positions are looked up.
    """
    looked_up = {
        id(weight): weight.numel()
        for weight in decoder.parameters()
        if (role := role_of(weight)) is not None and role.embedding
    }
    looked_up.pop(id(decoder.head.weight), None)  # a tied head multiplies by the table
    return sum(weight.numel() for weight in decoder.parameters()) - sum(looked_up.values())
