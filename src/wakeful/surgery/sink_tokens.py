"""`choose_sink_tokens`: which tokens, stored before a text, take its sink at no loss.

Which token attention parks on is the model's own affair: BOS where it was trained with one, any
token at the beginning, or a delimiter. So it is measured on windows of text:

1. The loss. Every candidate is stored, and the windows' losses are paired with those of the model
   as it reads them now. A candidate is as good as the one of least loss where the 95% interval of
   their paired difference includes zero and the difference itself is small: of few windows an
   interval includes almost everything.
2. The sink that remains: of those, the ones after which the text's first token is the most attended
   key of few (query, head) pairs.
3. BOS if it is among them, else the one of least loss.

Storing nothing is a candidate as well. It wins where every token makes the loss worse.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from wakeful.estimates import LossChange
from wakeful.model.decoder import Decoder
from wakeful.probes.attention import Sinks
from wakeful.probes.base import mean_over_layers
from wakeful.probes.exact import even_shares
from wakeful.probes.running import logits_of
from wakeful.probes.watch import watch
from wakeful.surgery.prefix import store_prefix
from wakeful.terminal.display import OnProgress, ignore_progress

FREED = 0.05
"""Share of (query, head) pairs led by the text's first token, over that of even attention, up to
which it is no sink."""
FINALISTS = 4
"""Candidates that are measured on all windows; more are first read on a few short ones."""
SCREENED = 4, 64
"""Windows, and the first tokens of each, that more candidates than those are first read on."""
SHARE_WINDOWS = 4
"""Windows on which the share of attention is measured."""


@dataclass(frozen=True)
class SinkTrial:
    """A prefix and what it does to windows of text."""

    tokens: tuple[int, ...]
    """The stored ids; none is the model as it is."""
    losses: tuple[float, ...]
    """Mean loss of each window, in nats per token."""
    share: float | None = None
    """Share of (query, head) pairs led by the text's first token, row 0 left out; None where the
    loss had decided already."""
    mass: float | None = None
    """Mean attention on that token, likewise."""


@dataclass(frozen=True)
class SinkChoice:
    """The prefix that was chosen, and all that were measured on every window."""

    best: SinkTrial
    """The prefix that takes the sink without loss; no tokens if there is none."""
    token: SinkTrial
    """The same of prefixes alone, whatever they cost."""
    trials: tuple[SinkTrial, ...]
    """The model as it is first."""

    def change(self, trial: SinkTrial) -> LossChange:
        """Return what a trial changes in the loss."""
        return LossChange.between(self.trials[0].losses, trial.losses)


@torch.no_grad()
def choose_sink_tokens(
    decoder: Decoder,
    windows: Int[Tensor, "B L"],
    candidates: Sequence[int],
    *,
    preferred: int | None = None,
    opening: Sequence[int] = (),
    before: Sequence[int] = (),
    on_progress: OnProgress = ignore_progress,
) -> SinkChoice:
    """Choose the candidate that is best stored before a text, by the order above.

    Args:
        decoder: is not changed.
        windows: text to measure on.
        candidates: token ids, at least one.
        preferred: BOS, which is chosen if it is as good as the best.
        opening: tokens that the uncured model reads before each window.
        before: tokens already chosen, which are stored before the candidate.
        on_progress: called with the number of candidates measured and of all candidates.

    Raises:
        WakefulError: an id is past the vocabulary, or the model has a stored prefix already.
    """
    ids = [*dict.fromkeys(candidates)]
    total = len(ids) + FINALISTS

    def prefixed(token: int) -> Decoder:
        return store_prefix(decoder, [*before, token])

    if len(ids) > FINALISTS:
        rows, length = SCREENED
        screening_windows = windows[:rows, :length]
        screened: dict[int, float] = {}
        for number, token in enumerate(ids):
            on_progress(number, total)
            screened[token] = sum(losses_after_opening(prefixed(token), screening_windows))
        ids = sorted(ids, key=screened.__getitem__)[:FINALISTS]
        if preferred in screened and preferred not in ids:
            ids[-1] = preferred
    uncured = SinkTrial((), losses_after_opening(decoder, windows, opening))
    trials = dict[int, SinkTrial]()
    for number, token in enumerate(ids):
        on_progress(total - FINALISTS + number, total)
        losses = losses_after_opening(prefixed(token), windows)
        trials[token] = SinkTrial((*before, token), losses)
    choice = choose_sink_cure(
        uncured, trials, preferred=preferred, even=float(even_shares(windows.shape[1])[0]),
        measure_share=lambda token: first_token_share(prefixed(token), windows[:SHARE_WINDOWS]),
    )  # fmt: skip
    on_progress(total, total)
    return choice


def choose_sink_cure(
    none: SinkTrial,
    trials: Mapping[int, SinkTrial],
    *,
    preferred: int | None,
    even: float,
    measure_share: Callable[[int], tuple[float, float]],
) -> SinkChoice:
    """Return which of the trials, by their last token, is best beside storing nothing.

    `measure_share` gives the share and the mass that remain after a token, which are asked for as
    long as they decide; `even` is the share of even attention.
    """
    measured: list[SinkTrial] = []
    for token in by_preference(trials, preferred):
        share, mass = measure_share(token)
        measured.append(replace(trials[token], share=share, mass=mass))
        if share <= FREED + even:
            break
    token = min(measured, key=_share)
    harmless = LossChange.between(none.losses, token.losses).is_harmless
    unmeasured = [
        trial for trial in trials.values() if trial.tokens not in {m.tokens for m in measured}
    ]
    return SinkChoice(token if harmless else none, token, (none, *measured, *unmeasured))


def _share(trial: SinkTrial) -> float:
    return math.inf if trial.share is None else trial.share


def by_preference(trials: Mapping[int, SinkTrial], preferred: int | None) -> list[int]:
    """Return the tokens as good in loss as the best, the preferred first, then by their loss."""
    ordered = sorted(trials, key=lambda token: sum(trials[token].losses))
    best = trials[ordered[0]].losses
    tied = [
        token for token in ordered if LossChange.between(best, trials[token].losses).is_harmless
    ]
    return sorted(tied, key=lambda token: token != preferred)


def first_token_share(model: nn.Module, windows: Int[Tensor, "B L"]) -> tuple[float, float]:
    """Return the share of (query, head) pairs led by each window's first token and the attention
    that it takes, row 0 left out: means over layers.
    """
    sinks = Sinks()
    with torch.inference_mode(), watch(model, sinks):
        for row in windows:
            logits_of(model, row[None])
    rows = sinks.rows()
    rows = rows.filter(rows["head"].is_null())
    share, mass = (
        mean_over_layers(rows.filter(metric=f"first_key_{part}_without_row_0"))
        for part in ("share", "mass")
    )
    return share or 0.0, mass or 0.0


def prepend_tokens(opening: Sequence[int], text: Int[Tensor, "B L"]) -> Int[Tensor, "B S"]:
    """Return a text's token ids after the tokens `opening`."""
    first = torch.tensor([list(opening)], dtype=text.dtype, device=text.device)
    return torch.cat([first.expand(len(text), -1), text], 1)


@torch.inference_mode()
def losses_after_opening(
    model: nn.Module, windows: Int[Tensor, "B L"], opening: Sequence[int] = ()
) -> tuple[float, ...]:
    """Return the mean loss of each window's tokens after its first, in nats per token.

    Every window is read alone, after `opening`.
    """
    losses: list[float] = []
    for row in windows:
        logits = logits_of(model, prepend_tokens(opening, row[None]))[0, len(opening) : -1].float()
        losses.append(float(cross_entropy(logits, row[1:], reduction="none").double().mean()))
    return tuple(losses)
