"""Sinks that are not the first token: tokens of a text that take more attention than their share.

A kind of key K is a token id, a position of the sequences, or all delimiters (tokens without a
letter or a digit); a sequence's first token is in none. Over all (query, head, layer) triples but
those of row 0,

    share   the fraction whose largest weight is on a key of K
    mass    the mean weight on the keys of K
    even    the share of even attention: the mean over queries i of n_K(i) / (i + 1), with n_K(i)
            keys of K among the i + 1 that query i sees

K is a sink where its share exceeds `even` by more than `EXCESS`, and share and mass are both over
`TIMES` that. A token that is frequent, or that attends to itself, has the share of even attention
and is none; nor is one that leads by a hair. Keys that
one kind explains are left out of the next: ids come first, then positions, then delimiters.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from wakeful.probes import exact

EXCESS = 0.05
"""Share of attention over that of even attention up to which a kind of key is healthy, as the first
token is up to this share."""
TIMES = 2.0
"""The least multiple of even attention's share that a sink takes."""
_DELIMITERS = "delimiters together"


@dataclass(frozen=True, kw_only=True)
class LaterSink:
    """A kind of key that takes more than its share of attention."""

    name: str
    share: float
    mass: float
    even: float

    @property
    def excess(self) -> float:
        """The share less that of even attention."""
        return self.share - self.even

    def __str__(self) -> str:
        """Return a clause on the kind's share and mass, and the share under even attention."""
        is_or_are, receive = "is", "receives"
        if self.name == _DELIMITERS:
            is_or_are, receive = "are", "receive"
        return (
            f"{self.name} {is_or_are} the most attended key in {self.share:.1%} of pairs "
            f"({self.even:.1%} if attention were even) and {receive} {self.mass:.1%} of all "
            "attention"
        )


def later_sinks(
    sequences: Sequence[Sequence[int]],
    shares: Sequence[Float[Tensor, "L"]],
    masses: Sequence[Float[Tensor, "L"]],
    text_of: Callable[[int], str],
) -> tuple[LaterSink, ...]:
    """Return the sinks after the first token, sorted by share of attention, largest first.

    A sink is a kind of key: a token id, a position, or all delimiters (tokens without a letter or a
    digit). Its share exceeds the share under even attention by more than `EXCESS`, and its share
    and its mass are both more than `TIMES` the share under even attention. A key counts for one
    sink only: first for its token id, then for its position, last for the delimiters.

    Args:
        sequences: token ids, all of one length.
        shares: for each sequence and key, the fraction of (query, head, layer) triples whose
            largest weight is on that key.
        masses: for each sequence and key, the mean weight on that key.
        text_of: returns the text of a token.
    """
    ids = torch.tensor([list(sequence) for sequence in sequences])
    share, mass = (torch.stack([*values]).double() for values in (shares, masses))
    even = exact.even_shares(ids.shape[1]).expand(ids.shape)
    unexplained = torch.ones_like(ids, dtype=torch.bool)  # keys of no sink found so far
    unexplained[:, 0] = False  # the first token is no later sink
    texts = {token: text_of(token) for token in ids.unique().tolist()}
    sinks: list[LaterSink] = []

    def mean_sum(values: Float[Tensor, "B L"], keys: Bool[Tensor, "B L"]) -> float:
        """Return the sum of `values` over keys, as a mean over sequences."""
        return (values * keys).sum(1).mean().item()

    def collect(kinds: Mapping[str, Bool[Tensor, "B L"]]) -> None:
        """Append each kind of key that is a sink to `sinks`, and leave its keys out of later kinds.

        `kinds` maps a kind's name to the mask of its keys.
        """
        for name, all_keys in kinds.items():
            keys = all_keys & unexplained
            sink = LaterSink(
                name=name,
                share=mean_sum(share, keys),
                mass=mean_sum(mass, keys),
                even=mean_sum(even, keys),
            )
            if sink.excess > EXCESS and min(sink.share, sink.mass) > TIMES * sink.even:
                sinks.append(sink)
                unexplained[all_keys] = False

    collect({f"{text!r} (id {token})": ids == token for token, text in texts.items()})
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    collect({f"the token at position {n}": positions == n for n in range(1, ids.shape[1])})
    delimiters = [token for token, text in texts.items() if not any(map(str.isalnum, text))]
    collect({_DELIMITERS: torch.isin(ids, torch.tensor(delimiters, dtype=ids.dtype))})
    return tuple(sorted(sinks, key=lambda sink: sink.share, reverse=True))
