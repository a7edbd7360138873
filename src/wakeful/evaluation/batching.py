"""Questions to a decoder: few padded tokens, a shared context run once, logits only of answers.

A question is a context and an answer after it. Its inputs are all tokens but the last, and the
answer's tokens are predicted by the last of them. Questions of one context (the choices of one
example) differ in their answers alone, so the context's keys and values are computed once and every
answer continues from them. All but the last token of the context is shared: from that token on
logits are wanted.

Shapes: B rows, L tokens, D width, T answers' tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from wakeful.evaluation.perplexity import choices
from wakeful.model.cache import Cache
from wakeful.model.decoder import Decoder
from wakeful.quant.linear import QuantizedLinear

_WORTH = 32
"""Tokens that a pass over the contexts alone must save to be worth a pass."""


@dataclass(frozen=True)
class Question:
    """What one answer's likelihood is computed from."""

    place: int
    """Its number among those asked."""
    inputs: list[int]
    answer: list[int]

    @property
    def context(self) -> list[int]:
        """The inputs up to the one that predicts the answer's first token."""
        return self.inputs[: len(self.inputs) - len(self.answer) + 1]


@dataclass
class _Row:
    """One row of inputs, and the questions that its positions answer."""

    inputs: list[int]
    first: int
    """The position that predicts the first token of every answer."""
    questions: list[Question] = field(default_factory=list)

    @property
    def answered(self) -> int:
        """Positions whose logits are wanted."""
        return max(len(question.answer) for question in self.questions)


def answers(
    decoder: Decoder, questions: Sequence[Question], *, batch_size: int, alone: bool = False
) -> Iterator[tuple[int, float, bool]]:
    """Return place, log-likelihood in nats and whether greedy decoding writes it, of each answer.

    `batch_size` rows are run at a time, the longest first. `alone` runs every question by itself,
    for models in which tokens beside it would change its answer.
    """
    if alone:
        for question in questions:
            yield from _run(decoder, [_Row(question.inputs, len(question.context) - 1, [question])])
        return
    groups = _groups(questions)
    single = [rows[0] for rows in groups if len(rows) == 1]
    single.sort(key=lambda row: -len(row.inputs))
    for start in range(0, len(single), batch_size):
        yield from _run(decoder, single[start : start + batch_size])
    several = [rows for rows in groups if len(rows) > 1]
    several.sort(key=lambda rows: -rows[0].first)
    while several:
        # Contexts are cut where the shortest ends; what is longer is run for every answer.
        longest = several[0][0].first
        close = [rows for rows in several[:batch_size] if 4 * rows[0].first >= 3 * longest]
        several = several[len(close) :]
        yield from _shared(decoder, close, batch_size)


def _groups(questions: Sequence[Question]) -> list[list[_Row]]:
    """Return the rows of each context; an answer that begins a longer one needs no row."""
    contexts: dict[tuple[int, ...], list[_Row]] = {}
    for question in sorted(questions, key=lambda question: -len(question.answer)):
        context = question.context
        rows = contexts.setdefault(tuple(context), [])
        inputs = question.inputs
        row = next((row for row in rows if row.inputs[: len(inputs)] == inputs), None)
        if row is None:
            row = _Row(inputs, len(context) - 1)
            rows.append(row)
        row.questions.append(question)
    return list(contexts.values())


def _shared(
    decoder: Decoder, groups: list[list[_Row]], batch_size: int
) -> Iterator[tuple[int, float, bool]]:
    rows = [row for group in groups for row in group]
    rows.sort(key=lambda row: -len(row.inputs))
    number = {id(row): n for n, group in enumerate(groups) for row in group}
    cut = min(row.first for row in rows)
    saved = cut * (len(rows) - len(groups))
    cache = (
        _filled(decoder, [group[0].inputs[:cut] for group in groups]) if saved >= _WORTH else None
    )
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        if cache is None:
            yield from _run(decoder, part)
            continue
        rest = [_Row(row.inputs[cut:], row.first - cut, row.questions) for row in part]
        places = torch.tensor([number[id(row)] for row in part])
        yield from _run(decoder, rest, cache.continued(places, room=len(rest[0].inputs)))


@torch.inference_mode()
def _filled(decoder: Decoder, contexts: list[list[int]]) -> Cache:
    tokens = torch.tensor(contexts, device=decoder.embed.weight.device)
    cache = decoder.new_cache(*tokens.shape)
    decoder.hidden(tokens, cache=cache)
    return cache


@torch.inference_mode()
def _run(
    decoder: Decoder, rows: list[_Row], cache: Cache | None = None
) -> list[tuple[int, float, bool]]:
    """Run rows, padded at their end with tokens that no earlier position sees."""
    device = decoder.embed.weight.device
    tokens = torch.zeros(len(rows), max(len(row.inputs) for row in rows), dtype=torch.long)
    for n, row in enumerate(rows):
        tokens[n, : len(row.inputs)] = torch.tensor(row.inputs)
    states = decoder.hidden(tokens.to(device), cache=cache)
    head, capped = decoder.head, decoder.logits
    if isinstance(head, QuantizedLinear) and head.sees_padding:  # its scale is of all positions
        states, capped = head(states), decoder.capped
    wanted, which, targets = _wanted(rows, tokens.shape[1])
    likelihoods, greedy = choices(
        capped, states.flatten(0, 1), wanted.to(device), which.to(device), targets.to(device)
    )
    asked = [question for row in rows for question in row.questions]
    sizes = [len(question.answer) for question in asked]
    return [
        (question.place, float(nats.sum()), bool(best.all()))
        for question, nats, best in zip(
            asked, likelihoods.split(sizes), greedy.split(sizes), strict=True
        )
    ]


def _wanted(rows: list[_Row], length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the flat positions to predict from, and of each answer's tokens which and what."""
    wanted: list[int] = []
    which: list[int] = []
    targets: list[int] = []
    for n, row in enumerate(rows):
        for question in row.questions:
            which += range(len(wanted), len(wanted) + len(question.answer))
            targets += question.answer
        first = n * length + row.first
        wanted += range(first, first + row.answered)
    return torch.tensor(wanted), torch.tensor(which), torch.tensor(targets)
