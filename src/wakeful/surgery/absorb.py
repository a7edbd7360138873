"""`absorb`: move a stored token's value into biases, and its weight into learned parameters.

With a token z stored before the text, keys k_z and values v_z, a head of an ordinary softmax gives

    u_i = Σ_j p_ij v_j + p_iz v_z = v_z + Σ_j p_ij (v_j − v_z),
    p_ij = e^{q_i · k_j} / (e^{q_i · k_z} + Σ_j e^{q_i · k_j}).

A shift of all values is a bias of their projection, and v_z, turned by the output projection, is a
bias of that. What is left of z is the weight p_iz that it takes from all others.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from wakeful.errors import WakefulError
from wakeful.model.attend import causal_mask
from wakeful.model.decoder import Decoder
from wakeful.model.hooks import hooked
from wakeful.model.rebuild import rebuild_decoder
from wakeful.surgery.prefix import store_prefix

_SMALLEST = 1e-6
"""Least mean weight, so that its logarithm is finite."""


class RecordedAttention(NamedTuple):
    """One layer's attention over a text with the stored token as its first key."""

    layer: int
    q: Float[Tensor, "B L H d"]
    k: Float[Tensor, "B P G d"]
    scale: float

    def first_and_rest(
        self, shift: "Float[Tensor, '#1 L G d'] | None" = None
    ) -> tuple[Float[Tensor, "H N"], Float[Tensor, "H N"]]:
        """Return, for each query, the first key's logit and the log-sum-exp of all other visible
        keys.

        `shift` is subtracted from those keys. In float64, of N = B · L queries.
        """
        logits = first_and_rest_logits(self.q, self.k, self.scale, shift)
        first, rest = logits.movedim(0, 2).flatten(2)
        return first, rest


def first_and_rest_logits(
    q: Float[Tensor, "B L H d"],
    k: Float[Tensor, "B P G d"],
    scale: float,
    shift: "Float[Tensor, '#1 L G d'] | None" = None,
) -> Float[Tensor, "B 2 H L"]:
    """Return the first key's logit and the log-sum-exp of the other keys that a query sees, P = L +
    1, in float64.

    `shift` is subtracted from the other keys.
    """
    repeats, length = q.shape[2] // k.shape[2], q.shape[1]
    hidden = ~causal_mask(length, length, 0, q.device)
    ends = []
    for queries, keys in zip(q.double(), k.double(), strict=True):
        shifted = keys if shift is None else torch.cat([keys[:1], keys[1:] - shift[0]])
        per_head = shifted.repeat_interleave(repeats, dim=1)
        logits = torch.einsum("lhd,shd->hls", queries, per_head) * scale
        rest = logits[..., 1:].masked_fill(hidden, -torch.inf).logsumexp(-1)
        ends.append(torch.stack([logits[..., 0], rest]))
    return torch.stack(ends)


Learn = Callable[[RecordedAttention], tuple[Tensor | float, dict[str, Tensor]]]
"""Given a layer's attention: the change of its keys' bias, and further parameters by name."""


def check_replaceable(decoder: Decoder) -> None:
    """Raise `WakefulError` if learned sinks cannot replace a stored token."""
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
    for field, limit in (("relaxed_prefix", 1), ("stored_prefix", 0)):
        if getattr(config, field) > limit:
            raise WakefulError(
                f"model.{field} = {getattr(config, field)}: sinks stand for one token before a "
                "text of which no token sees a later one"
            )


@torch.no_grad()
def absorb(
    decoder: Decoder,
    token: int,
    text: Int[Tensor, "B L"],
    learn: Learn,
    **changes: str,
) -> Decoder:
    """Return a decoder without the stored `token`, whose values go into the attention's biases.

    `learn` gives each layer's key bias and further tensors; `changes` are of the configuration. All
    other weights are shared with `decoder`, which is not changed.
    """
    prefixed = store_prefix(decoder, [token])
    attentions = {n: block.attention for n, block in enumerate(prefixed.blocks)}
    shape = decoder.config.shape
    new: dict[str, Tensor] = {}

    def see(layer: int, heads: tuple[Any, ...]) -> None:
        q, k, v = heads
        attention = attentions[layer]
        scale = attention.dot.scale
        key, learned = learn(RecordedAttention(layer, q, k, scale))
        value = v[0, 0]
        repeated = value.repeat_interleave(shape.num_heads // shape.num_kv_heads, 0).flatten()
        added = {"query": 0.0, "key": key, "value": -value.flatten()}
        added["out"] = attention.out.weight @ repeated
        for part, bias in added.items():
            linear = cast(nn.Linear, attention.get_submodule(part))
            old = linear.bias
            old = linear.weight.new_zeros(len(linear.weight)) if old is None else old
            new[f"blocks.{layer}.attention.{part}.bias"] = old.detach() + bias
        new.update({name: tensor.to(q.dtype) for name, tensor in learned.items()})

    dots = {n: attention.dot for n, attention in attentions.items()}
    with hooked(dots, before=see):
        prefixed.hidden(text)
    if decoder.config.positions == "learned":
        new["positions.weight"] = decoder.positions.weight.detach()[1:].clone()
    return rebuild_decoder(
        decoder, new, attention_bias="all", max_length=decoder.config.max_length - 1, **changes
    )


def solve_sink(logits: Float[Tensor, "H N"], weights: Float[Tensor, "H N"]) -> Float[Tensor, "H"]:
    """Return s with mean σ(s − logits) = mean weights, for each head, by bisection."""
    mean = weights.mean(1, keepdim=True).clamp(_SMALLEST, 1 - _SMALLEST)
    # Where all ends were equal, s would be that plus the weight's log-odds: it lies in between.
    low, high = (bound + mean.logit() for bound in logits.aminmax(dim=1, keepdim=True))
    for _ in range(60):
        middle = (low + high) / 2
        too_small = (middle - logits).sigmoid().mean(1, keepdim=True) < mean
        low, high = torch.where(too_small, middle, low), torch.where(too_small, high, middle)
    return ((low + high) / 2).squeeze(1)
