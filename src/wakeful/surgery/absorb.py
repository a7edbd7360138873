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
        """Return two tensors in float64, with a number for each head and each of N = B · L queries:
        the logit of the first key, and the log-sum-exp of the logits of the other visible keys.

        The first key is that of the token whose key and value the model stores before every text.
        `shift` is subtracted from the other keys.
        """
        logits = first_and_rest_logits(self.q, self.k, self.scale, shift)
        first, rest = logits.movedim(0, 2).flatten(2)  # (B, 2, H, L) to (2, H, B · L)
        return first, rest


def first_and_rest_logits(
    q: Float[Tensor, "B L H d"],
    k: Float[Tensor, "B P G d"],
    scale: float,
    shift: "Float[Tensor, '#1 L G d'] | None" = None,
) -> Float[Tensor, "B 2 H L"]:
    """Return two numbers for each head and query, along axis 1, in float64: the logit of the first
    key, and the log-sum-exp of the logits of the other visible keys.

    There is one key more than there are queries, P = L + 1: query i sees the first key and the
    i + 1 after it. `shift` is subtracted from the keys after the first.
    """
    repeats, length = q.shape[2] // k.shape[2], q.shape[1]
    hidden = ~causal_mask(length, length, 0, q.device)
    results = []
    for queries, keys in zip(q.double(), k.double(), strict=True):  # one sequence, to save memory
        shifted = keys if shift is None else torch.cat([keys[:1], keys[1:] - shift[0]])
        keys_of_heads = shifted.repeat_interleave(repeats, dim=1)
        logits = torch.einsum("lhd,shd->hls", queries, keys_of_heads) * scale
        rest = logits[..., 1:].masked_fill(hidden, -torch.inf).logsumexp(-1)
        results.append(torch.stack([logits[..., 0], rest]))
    return torch.stack(results)


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
    # In a relaxed prefix, tokens see each other: one of a single token is ordinary causality.
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
    """Return a decoder whose biases and parameters replace a `token` stored before every text.

    The token's value goes into biases of the attention, and its weight into what `learn` returns,
    from each layer's attention on `text`: the change of the key bias, and further tensors. All
    other weights are shared with `decoder`, which is not changed.

    Args:
        decoder: is not changed.
        token: the id of the token to replace.
        text: sequences that `learn` sees the attention on.
        learn: called once for each layer.
        changes: of the configuration, such as another normalizer.
    """
    prefixed = store_prefix(decoder, [token])
    attentions = {layer: block.attention for layer, block in enumerate(prefixed.blocks)}
    shape = decoder.config.shape
    tensors: dict[str, Tensor] = {}

    def replace_token(layer: int, heads: tuple[Any, ...]) -> None:
        q, k, v = heads
        attention = attentions[layer]
        key_bias, learned = learn(RecordedAttention(layer, q, k, attention.dot.scale))
        token_value = v[0, 0]
        num_repeats = shape.num_heads // shape.num_kv_heads
        value_of_heads = token_value.repeat_interleave(num_repeats, 0).flatten()
        changes_of_bias = {
            "query": 0.0,  # not changed, but with attention_bias="all" it has to be there
            "key": key_bias,
            "value": -token_value.flatten(),
            "out": attention.out.weight @ value_of_heads,
        }
        for part, change in changes_of_bias.items():
            linear = cast(nn.Linear, attention.get_submodule(part))
            bias = linear.bias
            if bias is None:
                bias = linear.weight.new_zeros(len(linear.weight))
            tensors[f"blocks.{layer}.attention.{part}.bias"] = bias.detach() + change
        tensors.update({name: tensor.to(q.dtype) for name, tensor in learned.items()})

    dots = {layer: attention.dot for layer, attention in attentions.items()}
    with hooked(dots, before=replace_token):
        prefixed.hidden(text)
    # The text keeps the positions that it had after the token.
    if decoder.config.positions == "learned":
        tensors["positions.weight"] = decoder.positions.weight.detach()[1:].clone()
    max_length = decoder.config.max_length - 1
    return rebuild_decoder(decoder, tensors, attention_bias="all", max_length=max_length, **changes)


def solve_sink(logits: Float[Tensor, "H N"], weights: Float[Tensor, "H N"]) -> Float[Tensor, "H"]:
    """Return for each head the sink s, by bisection, that gets the mean of `weights`: over queries,
    mean σ(s − logits) = mean weights.

    `logits` are the log-sum-exp of all other keys' logits.
    """
    mean_weight = weights.mean(1, keepdim=True).clamp(_SMALLEST, 1 - _SMALLEST)
    # If all logits were equal, s would be that number plus the mean weight's log-odds. So it lies
    # between the sums for the smallest and the largest logit.
    smallest, largest = logits.aminmax(dim=1, keepdim=True)
    low, high = smallest + mean_weight.logit(), largest + mean_weight.logit()
    for _ in range(60):
        middle = (low + high) / 2
        too_small = (middle - logits).sigmoid().mean(1, keepdim=True) < mean_weight
        low, high = torch.where(too_small, middle, low), torch.where(too_small, high, middle)
    return ((low + high) / 2).squeeze(1)
